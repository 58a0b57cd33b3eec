"""Checks, before anything is started, that the engine of `rollout.name` supports what a run needs.

They hold for the servers that the run starts. Those of someone else report what they can do when
the run connects to them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from treadle.trainer.config.rollout import RolloutConfig
from treadle.trainer.config.schema import Config
from treadle.trainer.config.verl_keys import ConfigError
from treadle.trainer.rollout.server_process import engine_settings

__all__ = ["check_engine_settings", "check_row_features", "check_training_features"]

# Per engine, the settings that it lacks, and what to do instead.
_TORCH_ALONE: Final = dict.fromkeys(
    ("max_draft_tokens", "batch_invariant"), "set rollout.name=torch, or leave it out"
)
_LACKING: Final[Mapping[str, Mapping[str, str]]] = {
    "torch": {
        "tensor_model_parallel_size": "set rollout.name=vllm or sglang",
        "data_parallel_size": "raise rollout.num_replicas, or set rollout.name=vllm or sglang",
        "gpu_memory_utilization": "leave it out; rollout.max_in_flight bounds its KV cache",
        "kv_cache_bytes": "leave it out; rollout.max_in_flight bounds its KV cache",
        "max_num_batched_tokens": "leave it out",
        "enable_prefix_caching": "leave it out",
        "engine_args": "leave it out",
    },
    "vllm": _TORCH_ALONE,
    "vllm_stock": _TORCH_ALONE,
    "sglang": _TORCH_ALONE,
    "fake": _TORCH_ALONE,
}


def check_engine_settings(config: Config) -> None:
    """Checks that the run's engine supports the settings, before its server refuses them.

    What depends on the release and the build of an engine is left to its server.

    Raises:
        ConfigError: The engine does not have a setting, or not in this number format or on GPUs.
    """
    rollout = config.rollout
    if not rollout.num_replicas:
        return
    settings = engine_settings(rollout)
    lacking = [
        f"rollout.{key}={json.dumps(settings[key])}: {fix}"
        for key, fix in _LACKING.get(rollout.name, {}).items()
        if key in settings
    ]
    if lacking:
        raise ConfigError(f"rollout.name={rollout.name} does not have {'; '.join(lacking)}")
    if rollout.name == "torch" and rollout.batch_invariant and (other := _inexact(config)):
        raise ConfigError(
            f"rollout.batch_invariant=true holds in float32 on a CPU, and {other[0]}: {other[1]}, "
            "or leave rollout.batch_invariant out"
        )


def _inexact(config: Config) -> tuple[str, str] | None:
    """Returns the setting by which servers compute in another way, and what to do instead."""
    if (dtype := config.rollout.dtype) != "float32":
        return f"rollout.dtype={dtype}", "set rollout.dtype=float32"
    for key in ("gpus_per_node", "gpus_per_replica"):
        if gpus := getattr(config.launch, key, 0):
            return f"launch.{key}={gpus:g} gives servers GPUs", f"set launch.{key}=0"
    return None


def check_training_features(config: Config) -> None:
    """Checks that the run's engine reports what training reads.

    Raises:
        ConfigError: The engine does not report it.
    """
    _check_stock(config.rollout, _read_in_training(config))


def _read_in_training(config: Config) -> Iterator[str]:
    if (truncation := config.rollout.truncation) is not None:
        yield f"{truncation} needs the tokens that it keeps"
    if config.policy.moe.routing_replay:
        yield "policy.moe.routing_replay=true needs the experts that the engine chose"


def check_row_features(rollout: RolloutConfig, *, images: bool, constraints: bool) -> None:
    """Checks that the run's engine takes the rows.

    Args:
        images: Whether a row has images.
        constraints: Whether a loop of the rows constrains what is sampled.

    Raises:
        ConfigError: The engine does not take them.
    """
    needs = {"rows have images": images, "agent loops have constraints": constraints}
    _check_stock(rollout, (need for need, present in needs.items() if present))


def _check_stock(rollout: RolloutConfig, needs: Iterable[str]) -> None:
    if rollout.name != "vllm_stock" or not rollout.num_replicas:
        return
    if listed := " and ".join(needs):
        raise ConfigError(
            f"rollout.name=vllm_stock does not support what this run needs: {listed}. Set "
            "rollout.name=vllm, or leave that out (docs/engines.md)"
        )
