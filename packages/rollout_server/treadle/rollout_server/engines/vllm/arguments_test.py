from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from treadle.rollout_server.config.schema import ServedModelConfig, ServerConfig
from treadle.rollout_server.engine import ModelInfo
from treadle.rollout_server.engines.common.arguments import merge_arguments, reject_unsupported
from treadle.rollout_server.engines.vllm.arguments import (
    UNSUPPORTED,
    managed_arguments,
    reports_experts,
)

MODEL = ModelInfo(architecture="Qwen3MoeForCausalLM", vocab_size=61, context_length=512)


def arguments(
    *, on_cpu: bool = False, engine_args: Any = None, vision: object = None, **model: Any
) -> dict[str, Any]:
    config = ServerConfig(
        engine="vllm",
        model=ServedModelConfig(path=Path("m"), **model),
        engine_args=engine_args or {},
    )
    own = managed_arguments(config, context_length=512, on_cpu=on_cpu, vision=vision)
    known = [*own, "block_size", "seed"]
    return merge_arguments(own, config.engine_args, known=known, argument_class="EngineArgs")


def test_our_keys_become_vllms_arguments() -> None:
    found = arguments(
        dtype="bfloat16",
        max_num_seqs=7,
        tensor_model_parallel_size=2,
        data_parallel_size=3,
        gpu_memory_utilization=0.5,
        max_num_batched_tokens=99,
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    wanted = {
        "model": "m",
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_seqs": 7,
        "tensor_parallel_size": 2,
        "data_parallel_size": 3,
        "gpu_memory_utilization": 0.5,
        "max_num_batched_tokens": 99,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "scheduling_policy": "priority",
    }
    assert wanted.items() <= found.items()


def test_what_is_not_set_is_left_to_vllm() -> None:
    assert not arguments().keys() & {
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "max_num_batched_tokens",
        "speculative_config",
    }


def test_the_cpu_compiles_nothing_and_does_not_take_all_memory() -> None:
    found = arguments(on_cpu=True)
    assert (found["enforce_eager"], found["enable_sleep_mode"]) == (True, False)
    assert found["kv_cache_memory_bytes"] == 1 << 30
    assert arguments(on_cpu=True, kv_cache_bytes=5)["kv_cache_memory_bytes"] == 5
    assert "kv_cache_memory_bytes" not in arguments(on_cpu=True, gpu_memory_utilization=0.1)


def test_a_model_that_sees_gets_patches_from_us() -> None:
    setup = object()
    found = arguments(vision=setup)
    assert found["additional_config"] is setup
    assert (found["mm_processor_cache_gb"], found["mm_device_do_normalize"]) == (0, False)
    assert "additional_config" not in arguments()
    with pytest.raises(ValueError, match=r"engine_args\.additional_config is set by"):
        arguments(vision=setup, engine_args={"additional_config": {}})


def test_vllms_own_arguments_join_ours() -> None:
    assert arguments(engine_args={"block_size": 64})["block_size"] == 64


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_model_len", "set model.context_length"),
        ("max_num_batched_tokens", "set model.max_num_batched_tokens"),
        ("speculative_config", "leave it out"),
        ("blocksize", "did you mean block_size"),
    ],
)
def test_what_we_decide_is_not_vllms_to_be_told(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arguments(engine_args={name: 1})


def experts(*, layers: int = 2, prefix_caching: bool = True, **engine_args: Any) -> bool:
    settings = ServedModelConfig(path=Path("m"), enable_prefix_caching=prefix_caching)
    config = ServerConfig(engine="vllm", model=settings, engine_args=engine_args)
    return reports_experts(config, replace(MODEL, num_moe_layers=layers))


def test_experts_are_reported_where_vllm_can() -> None:
    assert experts()
    assert not experts(enable_return_routed_experts=False)
    assert not experts(layers=0)
    assert not experts(prefix_caching=False)
    assert not experts(pipeline_parallel_size=2)
    with pytest.raises(ValueError, match=r"is true, but model\.enable_prefix_caching is false"):
        experts(prefix_caching=False, enable_return_routed_experts=True)


def test_keys_of_other_engines_are_refused() -> None:
    config = ServerConfig(model=ServedModelConfig(prefix_cache_bytes=1))
    with pytest.raises(ValueError, match=r"prefix_cache_bytes is 1.*set model\.kv_cache_bytes"):
        reject_unsupported(config, "vllm", UNSUPPORTED)
