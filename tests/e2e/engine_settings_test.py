"""Settings that the torch engine's server refuses are refused before a run starts anything."""

import asyncio
from typing import Any

import pytest

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engines.torch import create
from treadle.trainer.config.load import ConfigError
from treadle.trainer.config.rollout import RolloutConfig
from treadle.trainer.rollout.server_process import check_engine_settings, engine_settings

SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("tensor_model_parallel_size", "data_parallel_size"), 2),
    **dict.fromkeys(("kv_cache_bytes", "max_num_batched_tokens"), 64),
    "gpu_memory_utilization": 0.5,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "engine_args": {"block_size": 16},
}
"""Each differs from its default."""


def test_a_run_refuses_what_its_server_would() -> None:
    assert engine_settings(RolloutConfig.model_validate(SETTINGS)) == SETTINGS
    refused = set[str]()
    for key, value in SETTINGS.items():
        of_server = {key: value} if key == "engine_args" else {"model": {key: value}}
        with pytest.raises(ValueError) as raised:
            asyncio.run(create(ServerConfig.model_validate(of_server)))  # it has no model either
        rollout = RolloutConfig.model_validate({key: value})
        if "does not support" in str(raised.value):
            refused.add(key)
            with pytest.raises(ConfigError, match=rf"does not have rollout\.{key}="):
                check_engine_settings(rollout)
        else:
            check_engine_settings(rollout)
    assert refused == SETTINGS.keys() - {"enforce_eager"}
