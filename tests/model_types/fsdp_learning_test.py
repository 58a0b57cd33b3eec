"""Every type of model that the FSDP backend claims, and no type of transformers without a word."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from treadle.policy.backends.fsdp.description import FsdpDescription, FsdpModel
from treadle.policy.backends.fsdp.model_types import IN_ROWS, MODEL_TYPES, PACKED, REFUSED, SHARED
from treadle.policy.testing.any_model import check_sharding, check_type, tiny_config

FAMILIES = ("glm4_moe", "gemma3_text", "minimax_m2", "mixtral", "qwen3", "qwen3_5_text")


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_a_type_is_computed_exactly(model_type: str, tmp_path: Path) -> None:
    assert check_type("fsdp", model_type, tmp_path) == (model_type in PACKED)


def test_a_type_is_trained_or_refused_with_a_reason() -> None:
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert set(MODEL_TYPES) | set(REFUSED) == known
    assert not set(PACKED) & set(IN_ROWS)


@pytest.mark.parametrize("sizes", [{"data": 2}, {"data": 4}, {"data": 4, "replicas": 2}])
def test_ranks_that_share_a_model_compute_what_one_does(
    sizes: dict[str, int], tmp_path: Path
) -> None:
    check_sharding("fsdp", FAMILIES, tmp_path, **sizes)


@pytest.mark.parametrize("sizes", [{"context": 2}, {"context": 4}, {"context": 2, "data": 2}])
def test_ranks_that_share_rows_compute_what_one_does(sizes: dict[str, int], tmp_path: Path) -> None:
    """All types with two ranks, else those whose attention differs."""
    types = sorted(SHARED) if sizes == {"context": 2} else ("deepseek_v3", "gemma3_text", "gpt_oss")
    check_sharding("fsdp", types, tmp_path, **sizes)


@pytest.mark.parametrize(
    "sizes", [{"data": 2}, {"data": 4}, {"data": 4, "replicas": 2}, {"data": 2, "context": 2}]
)
def test_ranks_that_share_experts_compute_what_one_does(
    sizes: dict[str, int], tmp_path: Path
) -> None:
    """All types that have experts with two ranks, else those whose experts differ."""
    types: Sequence[str] = ("deepseek_v3", "gpt_oss", "qwen3_moe")
    if sizes == {"data": 2}:
        types = [t for t in MODEL_TYPES if _described(tmp_path / "described" / t, t).num_experts]
        assert len(types) > 40
    check_sharding("fsdp", types, tmp_path / "models", **sizes, expert=2)


@pytest.mark.parametrize(
    "sizes", [{"tensor": 2}, {"tensor": 2, "data": 2}, {"tensor": 2, "data": 4, "replicas": 2}]
)
def test_ranks_that_share_matrices_compute_what_one_does(
    sizes: dict[str, int], tmp_path: Path
) -> None:
    """All types with a plan with two ranks, else those whose plans differ."""
    types: Sequence[str] = ("deepseek_v2", "gemma4_unified_text", "granite_swa", "olmo2", "qwen2")
    if sizes == {"tensor": 2}:
        described = {t: _described(tmp_path / "described" / t, t) for t in MODEL_TYPES}
        types = [t for t, model in described.items() if model.split_by > 1]
        assert len(types) > 75
        # Another order of sums changes the norm of this random model by 1.4e-5 in float32, by 1e-9
        # in float64; gemma4_unified_text has the same layers.
        types.remove("gemma4_text")
    check_sharding("fsdp", types, tmp_path / "models", **sizes)


def _described(folder: Path, model_type: str) -> FsdpModel:
    tiny_config(model_type).save_pretrained(folder)
    return FsdpDescription().read_model(folder)
