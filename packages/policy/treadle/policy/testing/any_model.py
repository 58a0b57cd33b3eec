"""A tiny random model of any type of transformers, and what a backend must do with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.backend import PolicyBackend, Rendezvous
from treadle.policy.backends import registry
from treadle.policy.client.types import StepStats, TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.choices import BackendName
from treadle.policy.config.policy import ParallelConfig, PolicyConfig
from treadle.policy.testing.contract_base import LINEAR, Weights, exported, largest_difference
from treadle.policy.testing.ranks import RankTask, run_ranks
from treadle.policy.testing.tiny import VOCAB, sequences

LENGTHS: Final = (18, 41, 9, 26)
"""Some are longer than the windows and chunks of tiny models."""

_SIZES: Final[Mapping[str, int]] = {
    "vocab_size": VOCAB,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_hidden_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_latent_size"), 32),
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_top_k", "moe_topk"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    "max_position_embeddings": 256,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    "v_head_dim": 16,
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads"), 8),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head", "mamba_d_state"), 16),
    **dict.fromkeys(("ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1),
    "mamba_d_ssm": 128,
    "sliding_window": 20,
    "attention_chunk_size": 16,
    "chunk_size": 16,
    "rotary_dim": 8,
    "vocab_size_per_layer_input": VOCAB,
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "index_topk"), 8),
    "index_head_dim": 16,
    "index_n_heads": 2,
}
"""Settings by the names that configurations use, for those that a type has."""

_OWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "hc_mult": 2,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    },
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "falcon": {"head_dim": ...},
    "gemma3n_text": {
        "intermediate_size": 96,
        "activation_sparsity_pattern": 0.0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 0,
    },
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 20},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "modernbert-decoder": {"pad_token_id": 0},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 2},
}
"""Settings of one type beside these, which are used whole; an ellipsis: leave it as it is."""


def tiny_config(model_type: str, **others: Any) -> Any:
    """Returns the configuration of a tiny model: that of its class with sizes that are small.

    Args:
        others: More settings, where the type has them.
    """
    import transformers

    of_type: Any = transformers.CONFIG_MAPPING[model_type]
    usual = of_type()
    own = _OWN.get(model_type, {})
    settings: dict[str, Any] = {}
    for name, size in _SIZES.items():
        # Of one that layers may have of their own, transformers raises an error.
        default = vars(usual).get(name) or getattr(usual, name, True)
        if type(default) is int or (name == "head_dim" and default is None):
            settings[name] = size
    if "qk_rope_head_dim" in settings:  # latent attention: sizes of heads by other names
        settings.pop("head_dim", None)
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    for alias, name in of_type.attribute_map.items():
        if name in settings:
            settings.pop(alias, None)
    settings |= {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1, **own}
    settings |= {name: value for name, value in others.items() if hasattr(usual, name)}
    return of_type(**{name: value for name, value in settings.items() if value is not ...})


def write_any(folder: Path, model_type: str, **others: Any) -> Any:
    """Writes a tiny random model of a type, and returns it; `others` are as in `tiny_config`."""
    import transformers

    torch.manual_seed(0)
    models: Any = transformers.AutoModelForCausalLM
    model = models.from_config(tiny_config(model_type, **others)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # experts by id, which begin at 0
                buffer.random_(0, model.config.n_routed_experts)
    model.train(False)
    model.save_pretrained(folder)
    return model


def check_type(backend: BackendName, model_type: str, folder: Path) -> bool:
    """Checks log-probabilities, packing, a step of GRPO, the export and its reading.

    Returns:
        Whether sequences were packed end to end.
    """
    import transformers

    reference = write_any(folder / "model", model_type)
    everything = load_file(folder / "model" / "model.safetensors")
    stored = {name: t for name, t in everything.items() if t.is_floating_point()}
    batch = sequences(LENGTHS, vocab=tiny_vocab(reference))
    loss = policy_loss(AlgorithmConfig(entropy_coef=0.01))

    def step(tokens: int) -> tuple[StepStats, Weights]:
        policy = registry.build(
            PolicyConfig(backend=backend, optimizer=LINEAR, micro_batch_tokens=tokens),
            folder / "model",
            Rendezvous(),
            keep_reference=False,
            reference_path=None,
        )
        try:
            if packs := tokens > 2:
                _check_logprobs(reference, policy, batch)
                weights = exported(policy)
                assert weights.keys() == stored.keys()
                assert all(np.array_equal(weights[n], t.numpy()) for n, t in stored.items())
                shapes = [(name, weight.shape) for name, weight in weights.items()]
                assert [(spec.name, spec.shape) for spec in policy.weight_specs()] == shapes
            stats = policy.train_step(batch, loss)
            assert (work := policy.work()) is None or 0 < work.flops([4], 2) < math.inf
            if packs:
                policy.save_hf(folder / "saved")
                saved = load_file(folder / "saved" / "model.safetensors")
                assert {n: t.dtype for n, t in saved.items()} == {
                    n: t.dtype for n, t in everything.items()
                }
                again = transformers.AutoModelForCausalLM.from_pretrained(folder / "saved")
                _check_logprobs(again, policy, batch)
            return stats, exported(policy)
        finally:
            policy.close()

    packed, weights = step(8192)
    assert packed.num_micro_batches == 1
    alone, wanted = step(2)
    assert alone.num_micro_batches == len(batch)
    assert not packed.skipped and packed.grad_norm > 0
    assert packed.loss == pytest.approx(alone.loss, abs=1e-6)
    assert packed.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)
    assert largest_difference(weights, wanted) < 2e-6
    assert largest_difference(weights, {n: t.numpy() for n, t in stored.items()}) > 0
    return bool(packed.num_rows == packed.num_tokens)


def tiny_vocab(model: Any) -> int:
    """Returns the number of ids of a model."""
    return int(model.config.get_text_config().vocab_size)


def _check_logprobs(reference: Any, policy: PolicyBackend, batch: Sequence[TrainSequence]) -> None:
    """Checks log-probabilities against those of transformers, one sequence after the other."""
    for sequence, got in zip(batch, policy.logprobs(batch), strict=True):
        ids = torch.tensor(sequence.ids)
        with torch.no_grad():
            logp = reference(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        want = logp.gather(-1, ids[1:, None])[:, 0] * torch.tensor(sequence.loss_mask[1:])
        assert got == pytest.approx([0.0, *want.tolist()], abs=1e-5)


def sharded(task: RankTask) -> dict[str, tuple[Any, float, Weights]]:
    """Takes steps with each model of a folder, as one of several ranks."""
    backend, models, parallel = task.argument
    return {
        folder.name: _steps(
            backend,
            folder,
            parallel,
            Rendezvous(
                rank=task.rank,
                world_size=task.num_ranks,
                shared_file=task.folder / folder.name,
            ),
        )
        for folder in sorted(models.iterdir())
    }


def _steps(
    backend: BackendName, folder: Path, parallel: ParallelConfig, place: Rendezvous
) -> tuple[Any, float, Weights]:
    config = PolicyConfig(
        backend=backend,
        optimizer=LINEAR,
        micro_batch_tokens=60,
        logits_chunk_tokens=4096 if parallel.num_ranks == 1 else 16,
        parallel=parallel,
    )
    policy = registry.build(
        config,
        folder,
        place,
        keep_reference=False,
        reference_path=None,
    )
    try:
        # Two steps: the second is of weights that the first has written to every shard.
        batch = sequences(LENGTHS)
        logprobs = policy.logprobs(batch)
        loss = policy_loss(AlgorithmConfig(entropy_coef=0.01))
        # Of the first: what some random models add to a rounding is more than that in the second.
        norm = policy.train_step(batch, loss).grad_norm
        policy.train_step(sequences(LENGTHS, seed=8), loss)
        return logprobs, norm, exported(policy)
    finally:
        policy.close()


def check_sharding(
    backend: BackendName, model_types: Sequence[str], folder: Path, **sizes: int
) -> None:
    """Checks that ranks that share models compute what one process does.

    Args:
        sizes: Numbers of processes by their names in `ParallelConfig`.
    """
    parallel = ParallelConfig.model_validate(sizes)
    for model_type in model_types:
        write_any(folder / model_type, model_type)
    ranks = run_ranks(f"{__name__}:sharded", parallel.num_ranks, (backend, folder, parallel))
    for model_type in model_types:
        logprobs, norm, weights = _steps(
            backend, folder / model_type, ParallelConfig(), Rendezvous()
        )
        for rank in ranks:
            got_logprobs, got_norm, got = rank[model_type]
            for one, other in zip(got_logprobs, logprobs, strict=True):
                assert one == pytest.approx(other, abs=1e-5), model_type
            assert got_norm == pytest.approx(norm, rel=1e-5), model_type
            assert largest_difference(got, weights) < 2e-6, model_type
