"""Settings that the server of an engine refuses are refused before a run starts anything."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engines.torch import create
from treadle.rollout_server.engines.vllm.arguments import UNSUPPORTED
from treadle.trainer.config.load import ConfigError
from treadle.trainer.config.rollout import RolloutConfig
from treadle.trainer.config.schema import Config, DataConfig, ModelConfig
from treadle.trainer.rollout.engine_checks import check_engine_settings
from treadle.trainer.rollout.server_process import engine_settings

SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("tensor_model_parallel_size", "data_parallel_size"), 2),
    **dict.fromkeys(("kv_cache_bytes", "max_num_batched_tokens"), 64),
    "gpu_memory_utilization": 0.5,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "max_draft_tokens": 4,
    "batch_invariant": True,
    "engine_args": {"block_size": 16},
}
"""Each differs from its default."""


def _config(**rollout: Any) -> Config:
    return Config(
        data=DataConfig(train_files=(Path("t.jsonl"),)),
        model=ModelConfig(path=Path("m")),
        rollout=RolloutConfig.model_validate(rollout),
    )


def test_a_run_refuses_what_its_server_would() -> None:
    assert engine_settings(RolloutConfig.model_validate(SETTINGS)) == SETTINGS
    refused = set[str]()
    for key, value in SETTINGS.items():
        of_server = {key: value} if key == "engine_args" else {"model": {key: value}}
        with pytest.raises(ValueError) as raised:
            asyncio.run(create(ServerConfig.model_validate(of_server)))  # it has no model either
        config = _config(**{key: value})
        if "does not support" in str(raised.value):
            refused.add(key)
            with pytest.raises(ConfigError, match=rf"does not have rollout\.{key}="):
                check_engine_settings(config)
        else:
            check_engine_settings(config)
    assert refused == SETTINGS.keys() - {"enforce_eager", "max_draft_tokens", "batch_invariant"}


@pytest.mark.parametrize("name", ["vllm", "vllm_stock"])
def test_a_run_refuses_what_every_vllm_would(name: str) -> None:
    keys = {key.removeprefix("model.") for key in UNSUPPORTED} & SETTINGS.keys()
    assert keys
    for key in keys:
        with pytest.raises(ConfigError, match=rf"does not have rollout\.{key}="):
            check_engine_settings(_config(name=name, **{key: SETTINGS[key]}))
