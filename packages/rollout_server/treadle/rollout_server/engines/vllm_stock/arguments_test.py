from pathlib import Path

import pytest

from treadle.rollout_server.config.schema import ServedModelConfig, ServerConfig
from treadle.rollout_server.engines.common.arguments import merge_arguments
from treadle.rollout_server.engines.vllm_stock.arguments import stock_arguments


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
