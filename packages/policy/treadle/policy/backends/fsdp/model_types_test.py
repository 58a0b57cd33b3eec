"""Families of this year and before, each by a tiny random model; all types: `tests/model_types`."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from treadle.policy.backends.description import UnsupportedModelError
from treadle.policy.backends.fsdp.description import FsdpDescription
from treadle.policy.backends.fsdp.model_types import MODEL_TYPES, REFUSED
from treadle.policy.backends.registry import choose
from treadle.policy.config.policy import ParallelConfig, PolicyConfig
from treadle.policy.testing.any_model import check_sharding, check_type, write_any

PACKED: Final = (
    *("qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text", "qwen3_moe", "mixtral"),
    *("glm4_moe", "gpt_oss", "deepseek_v3", "minimax_m2"),
)
RECURRENT: Final = ("qwen3_next", "qwen3_5_text", "nemotron_h", "deepseek_v4")


@pytest.mark.parametrize("model_type", [*PACKED, *RECURRENT])
def test_a_family_is_computed_exactly(model_type: str, tmp_path: Path) -> None:
    packs = check_type("fsdp", model_type, tmp_path)
    assert packs == (model_type in PACKED)


def test_ranks_that_share_a_model_compute_what_one_does(tmp_path: Path) -> None:
    """Attention with sinks, latent attention, experts, gated delta nets and Mamba."""
    types = ("deepseek_v3", "deepseek_v4", "gpt_oss", "nemotron_h", "qwen3_next")
    check_sharding("fsdp", types, tmp_path, data=2)


def test_ranks_that_share_experts_compute_what_one_does(tmp_path: Path) -> None:
    """Experts with biases and clamps, shared experts, Mamba beside experts without a gate."""
    types = ("deepseek_v3", "gpt_oss", "nemotron_h")
    check_sharding("fsdp", types, tmp_path, data=2, expert=2)


def test_ranks_that_share_matrices_compute_what_one_does(tmp_path: Path) -> None:
    """Norms of heads, latent attention, experts beside shared ones, gated delta nets."""
    types = ("deepseek_v3", "gemma3_text", "glm4_moe", "qwen3_next")
    check_sharding("fsdp", types, tmp_path, tensor=2)


def test_what_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    described = FsdpDescription()
    sizes: Any
    for model_type, sizes, why in (
        ("qwen3_next", {"context": 2}, "layers of 'qwen3_next' see other positions elsewhere"),
        ("qwen3", {"context": 3}, "context=3 does not divide the 4 attention heads"),
        ("qwen3", {"context": 4}, None),
        ("qwen3", {"data": 2, "expert": 2}, "expert=2 does not divide the 0 experts"),
        ("llama4_text", {"data": 2, "expert": 2}, "expert=2 does not divide the 0 experts"),
        ("gpt_oss", {"data": 3, "expert": 3}, "expert=3 does not divide the 4 experts"),
        ("gpt_oss", {"data": 2, "expert": 2}, None),
        ("qwen3", {"tensor": 4}, "whose greatest common divisor is 2"),
        ("gpt_oss", {"tensor": 2}, "transformers has no plan for 'gpt_oss'"),
        ("llama4_text", {"tensor": 2}, "transformers has no plan for 'llama4_text'"),
        ("qwen3", {"tensor": 2, "context": 2}, "does not go with policy.parallel.context=2"),
        ("qwen3", {"tensor": 2, "sequence": True}, "with policy.parallel.sequence=true: leave"),
        ("glm4_moe", {"tensor": 2, "expert": 2}, "does not go with policy.parallel.expert=2"),
        ("glm4_moe", {"tensor": 2, "data": 4, "replicas": 2}, None),
    ):
        write_any(tmp_path / model_type, model_type)
        model = described.read_model(tmp_path / model_type)
        problems = [*described.split_problems(model, ParallelConfig(**sizes))]
        assert len(problems) == (why is not None)
        assert all(str(why) in problem for problem in problems)


def test_a_rank_with_some_of_the_experts_gathers_no_others(tmp_path: Path) -> None:
    described = FsdpDescription()
    written = write_any(tmp_path, "glm4_moe")
    model = described.read_model(tmp_path)
    named = written.named_parameters()
    of_experts = sum(p.numel() for name, p in named if ".experts." in name)
    assert model.num_expert_parameters == of_experts > 0

    def gathered(**sizes: Any) -> int:
        policy = PolicyConfig(parallel=ParallelConfig(**sizes))
        return described.memory(model, policy, rows=64).activations

    # Weights and their gradients, half of the experts of four layers.
    assert gathered(data=2) - gathered(data=2, expert=2) == 2 * 4 * of_experts // 2 // 4
    assert gathered(data=2, tensor=2) < gathered(data=2)


def test_a_model_has_the_backend_that_computes_it() -> None:
    assert choose("qwen3", megatron_is_there=True) == ("megatron", "the first choice for 'qwen3'")
    assert choose("qwen3", megatron_is_there=False) == ("fsdp", "megatron-core is not installed")
    assert choose("qwen2_5_vl", megatron_is_there=False)[0] == "fsdp"
    assert choose("bert", megatron_is_there=False)[0] == "megatron"  # which says what is missing
    backend, why = choose("qwen3_next", megatron_is_there=True)
    assert (backend, why) == ("fsdp", "Megatron-core does not compute model type 'qwen3_next'")


def test_another_type_is_refused_by_name(tmp_path: Path) -> None:
    assert not set(MODEL_TYPES) & set(REFUSED)
    write_any(tmp_path, "llama")
    described = FsdpDescription()
    file = tmp_path / "config.json"
    config = file.read_text()
    assert described.read_model(tmp_path).num_parameters > 0
    for name, why in (("bert", REFUSED["bert"]), ("unheard_of", "not among those")):
        file.write_text(config.replace('"llama"', f'"{name}"'))
        with pytest.raises(UnsupportedModelError, match=rf"model type '{name}' is .*{why}"):
            described.read_model(tmp_path)
    settings = json.loads(config)
    settings["rope_parameters"] |= {"rope_type": "dynamic", "factor": 2.0}
    file.write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModelError, match="rope_type='dynamic' is not supported"):
        described.read_model(tmp_path)
