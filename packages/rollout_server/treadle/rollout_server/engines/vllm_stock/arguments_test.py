import json
from pathlib import Path
from typing import Any

import pytest

from treadle.rollout_server.config.schema import ServedModelConfig, ServerConfig
from treadle.rollout_server.engines.common.arguments import merge_arguments
from treadle.rollout_server.engines.vllm_stock.arguments import check_model, stock_arguments


def test_vllms_public_extensions_are_ours_to_set() -> None:
    config = ServerConfig(
        engine="vllm_stock",
        model=ServedModelConfig(path=Path("m"), max_num_seqs=7),
        engine_args={"logprobs_mode": "raw_logprobs"},
    )
    transfer = object()
    own = stock_arguments(config, context_length=512, on_cpu=True, transfer=transfer)
    found = merge_arguments(own, {}, known=own, argument_class="AsyncEngineArgs")
    assert found["max_num_seqs"] == 7
    assert found["weight_transfer_config"] is transfer
    assert found["logits_processors"][0].endswith("vllm_stock.draws:SeededDraws")
    with pytest.raises(ValueError, match=r"engine_args\.logprobs_mode is set by this server"):
        merge_arguments(own, config.engine_args, known=own, argument_class="AsyncEngineArgs")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "mixtral", "num_local_experts": 4}, "has experts"),
        ({"model_type": "qwen3_moe", "num_experts": 8}, "has experts"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, "has experts"),
        ({"model_type": "ernie4_5_moe", "moe_num_experts": [64, 64]}, "has experts"),
        ({"model_type": "llama4", "text_config": {"num_local_experts": 16}}, "has experts"),
        ({"model_type": "dbrx", "ffn_config": {"moe_num_experts": 16}}, "has experts"),
        ({"model_type": "qwen3_vl"}, "takes images"),
        ({"model_type": "granitemoehybrid", "num_local_experts": 0}, None),
        ({"model_type": "gemma4", "num_experts": None, "num_experts_per_tok": 2}, None),
        ({"model_type": "llama", "rope_parameters": {"factor": 8.0}}, None),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_a_model_whose_experts_a_cpu_would_not_update_is_refused(
    config: dict[str, Any], problem: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if problem is None:
        check_model("M", tmp_path, on_cpu=True)
        return
    with pytest.raises(ValueError, match=f"M {problem}.*: set --engine vllm"):
        check_model("M", tmp_path, on_cpu=True)
    if problem == "has experts":
        check_model("M", tmp_path, on_cpu=False)


def test_reports_of_experts_are_refused() -> None:
    config = ServerConfig(engine="vllm_stock", engine_args={"enable_return_routed_experts": True})
    with pytest.raises(ValueError, match="does not report experts: set engine vllm"):
        stock_arguments(config, context_length=512, on_cpu=True, transfer=None)
