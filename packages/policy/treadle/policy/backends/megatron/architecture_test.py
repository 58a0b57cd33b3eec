"""The table of model types in parallel layouts, and what of models is refused."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers

from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.backend import Rendezvous
from treadle.policy.backends.description import UnsupportedModelError
from treadle.policy.backends.megatron.architecture import MODEL_TYPES, REFUSED, Architecture
from treadle.policy.backends.megatron.backend import MegatronPolicy
from treadle.policy.backends.vision.shape import NAMING
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import LoraConfig, OptimizerConfig, ParallelConfig, PolicyConfig
from treadle.policy.testing.model_contract import assert_same_logprobs
from treadle.policy.testing.ranks import RankTask, run_ranks
from treadle.policy.testing.tiny import SETTINGS, sequences, write_model

# With eps = 1, Adam's step is about lr * g / (|g| + 1): parameters compare as gradients do.
CONFIG: Final = PolicyConfig(
    optimizer=OptimizerConfig(lr=0.05, eps=1.0, grad_clip=2.0, weight_decay=0.0)
)
DENSE: Final = tuple(
    name for name, blocks in MODEL_TYPES.items() if not blocks.experts and name not in NAMING
)


@pytest.fixture
def opened() -> Iterator[list[MegatronPolicy]]:
    """Policies to be closed at the end; one at a time can be open in a process."""
    policies: list[MegatronPolicy] = []
    yield policies
    for policy in policies:
        policy.close()


def test_windows_are_in_layers_with_experts_too(
    tmp_path: Path, opened: list[MegatronPolicy]
) -> None:
    settings: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 16}
    reference = write_model(tmp_path / "model", "qwen3_moe", **settings)
    policy = MegatronPolicy(CONFIG, tmp_path / "model")
    opened.append(policy)
    assert not policy.architecture.attention_is_plain
    assert_same_logprobs(reference, policy, sequences())


@pytest.mark.parametrize("model_type", [name for name in DENSE if name in SETTINGS])
def test_the_settings_of_tiny_models_matter(tmp_path: Path, model_type: str) -> None:
    """A setting that changed nothing would leave its variant untested in backend_test."""
    model = write_model(tmp_path, model_type)
    ids = torch.tensor([sequences()[3].ids])
    neutral: dict[str, Any] = {
        "sliding_window": 10_000,
        "query_pre_attn_scalar": 25,
        "attn_logit_softcapping": 50.0,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 9.0},
    }
    with torch.no_grad():
        logits = model(ids).logits
        for setting in SETTINGS[model_type]:
            other = write_model(tmp_path / setting, model_type, **{setting: neutral[setting]})
            other.load_state_dict(model.state_dict(), strict=setting != "attention_bias")
            assert (other(ids).logits - logits).abs().max() > 1e-3, setting


LAYOUTS: Final[Sequence[Mapping[str, Any]]] = (
    {"pipeline": 2},
    {"tensor": 2, "sequence": True},
)


def trained(
    folder: Path,
    rendezvous: Any = None,
    *,
    rank: int = 0,
    save: Path | None = None,
    load: Path | None = None,
    **parallel: Any,
) -> dict[str, Any]:
    """A step, before which the policy may be loaded, and after which it may be saved."""
    config = CONFIG.model_copy(
        update={
            "parallel": ParallelConfig(**parallel),
            "micro_batch_tokens": 80,
            "lora": LoraConfig(rank=rank),
        }
    )
    policy = MegatronPolicy(config, folder, rendezvous)
    batch = sequences()
    if load is not None:
        policy.load(load)
    result = {
        "logprobs": policy.logprobs(batch),
        "norm": policy.train_step(batch, policy_loss(AlgorithmConfig())).grad_norm,
        "weights": {t.name: t.tensor.clone() for t in policy.export_weights()},
    }
    if save is not None:
        policy.save(save)
    policy.close()
    return result


def run(task: RankTask) -> list[dict[str, Any]]:
    def place(number: int) -> Rendezvous:
        return Rendezvous(rank=task.rank, world_size=2, shared_file=task.folder / str(number))

    cases = [(name, layout) for name in NEW for layout in LAYOUTS]
    results = [
        trained(task.argument / name, place(number), **layout)
        for number, (name, layout) in enumerate(cases)
    ]
    for number, name in enumerate(FUSED):
        where = place(len(cases) + number)
        folder, saved = task.argument / name, task.argument / f"{name}-saved"
        results.append(trained(folder, where, rank=4, save=saved, tensor=2))
    return results


# backend_test and experts/ have the others.
NEW: Final = [name for name in DENSE if name not in ("llama", "qwen2", "qwen3")]
FUSED: Final = [name for name in DENSE if MODEL_TYPES[name].fused]


def test_parallel_sizes_do_not_change_the_result(tmp_path: Path) -> None:
    for name in NEW:
        write_model(tmp_path / name, name)
    ranks = run_ranks(f"{__name__}:run", 2, tmp_path)
    results = iter(zip(*ranks, strict=True))
    for name in NEW:
        alone = trained(tmp_path / name)
        for layout in LAYOUTS:
            assert_same(next(results), alone, f"{name} {layout}")
    for name in FUSED:
        alone = trained(tmp_path / name, rank=4, save=tmp_path / "alone")
        assert_same(next(results), alone, f"{name} with adapters")
        goes_on = [
            trained(tmp_path / name, rank=4, load=tmp_path / folder)
            for folder in ("alone", f"{name}-saved")
        ]
        assert_same(goes_on[1:], goes_on[0], f"{name} with adapters that two ranks saved")
        shutil.rmtree(tmp_path / "alone")


def assert_same(ranks: Sequence[dict[str, Any]], alone: dict[str, Any], what: str) -> None:
    for found in ranks:
        for got, want in zip(found["logprobs"], alone["logprobs"], strict=True):
            assert got == pytest.approx(want, abs=2e-5), what
        assert found["norm"] == pytest.approx(alone["norm"], rel=1e-5), what
        for name, tensor in found["weights"].items():
            assert (tensor - alone["weights"][name]).abs().max() < 2e-6, (what, name)
    assert set().union(*(found["weights"] for found in ranks)) == alone["weights"].keys(), what


def config_of(model_type: str, **settings: Any) -> transformers.PretrainedConfig:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4}
    make: Any = transformers.CONFIG_MAPPING[model_type]
    config: transformers.PretrainedConfig = make(**sizes, **settings)
    return config


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ("llama", {"attention_bias": True}, "attention_bias=True .* attention_bias=False only"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"hidden_act": "relu"}, "hidden_act='relu'.*'silu' or hidden_act='gelu_py"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop=0.1"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4, "use_sliding_window": True}, "chunke"),
    ],
)
def test_settings_that_are_not_computed_are_refused(
    model_type: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        Architecture.from_config(config_of(model_type, **settings))


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedModelError, match=r"config\.json has quantization_config \(fp8\)"
    ):
        Architecture.from_folder(tmp_path)


def test_what_cannot_be_split_shared_or_adapted_is_refused() -> None:
    glm4 = Architecture.from_config(config_of("glm4", num_key_value_heads=2))
    with pytest.raises(UnsupportedModelError, match="has up_proj: files of glm4 have gate_proj"):
        glm4.adapted(("o_proj", "up_proj"))
    assert glm4.adapted(("q_proj", "gate_proj", "up_proj", "down_proj")) == (
        "q_proj",
        "gate_up_proj",
        "down_proj",
    )
    with pytest.raises(UnsupportedModelError, match="tensor=4 does not divide the model's 2 key"):
        glm4.check_parallel(tensor=4, pipeline=1)
    glm4.check_sharing("always")
    gemma2 = Architecture.from_config(config_of("gemma2"))
    with pytest.raises(UnsupportedModelError, match="gemma2 has layers with a sliding window"):
        gemma2.check_sharing("always")
    gemma2.check_sharing("auto")
    glm4.check_context(2)
    gemma2.check_context(1)
    with pytest.raises(UnsupportedModelError, match=r"parallel\.context=2: gemma2 has layers with"):
        gemma2.check_context(2)


def test_other_model_types_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'gpt2' is not supported.*llama, mistral"):
        Architecture.from_config(transformers.GPT2Config())
    assert not REFUSED.keys() & MODEL_TYPES.keys()
    assert all(name in transformers.CONFIG_MAPPING for name in REFUSED)
    with pytest.raises(UnsupportedModelError, match=r"'qwen3_5' is not .*: it has gated delta net"):
        Architecture.from_config(transformers.CONFIG_MAPPING["qwen3_5"]())
