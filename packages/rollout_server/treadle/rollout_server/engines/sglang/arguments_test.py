import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from treadle.rollout_server.config.schema import ServedModelConfig, ServerConfig
from treadle.rollout_server.engine import ElementType, ModelInfo
from treadle.rollout_server.engines.sglang.arguments import (
    constrains,
    kv_bytes_per_token,
    reports_experts,
    server_arguments,
)

MODEL = ModelInfo(architecture="Qwen2ForCausalLM", vocab_size=61, context_length=512)
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
KNOWN = {
    "model_path",
    "max_total_tokens",
    "attention_backend",
    "chunked_prefill_size",
    "speculative_algorithm",
    "stream_interval",
    "enable_memory_saver",
    "enable_return_routed_experts",
    "grammar_backend",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"num_key_value_heads": 2}))
    return tmp_path


def arguments(path: Path, *, cpu: bool = True, given: Any = None, **model: Any) -> dict[str, Any]:
    config = ServerConfig(model=ServedModelConfig(path=path, **model), engine_args=given or {})
    return server_arguments(config, MODEL, cpu=cpu, known=KNOWN)


def test_experts_are_reported_where_sglang_can(path: Path) -> None:
    sparse = replace(MODEL, num_moe_layers=2)
    for given, reported in (
        ({}, True),
        ({"enable_return_routed_experts": False}, False),
        ({"chunked_prefill_size": -1}, False),
    ):
        config = ServerConfig(model=ServedModelConfig(path=path), engine_args=given)  # type: ignore[arg-type]
        assert reports_experts(config, sparse) is reported
        told = server_arguments(config, sparse, cpu=True, known=KNOWN)
        assert told["enable_return_routed_experts"] is reported
        assert not reports_experts(config, MODEL)


def test_a_mixture_that_sglang_would_compute_otherwise_is_refused(path: Path) -> None:
    (path / "config.json").write_text(json.dumps(SIZES | {"tie_word_embeddings": True}))
    config = ServerConfig(model=ServedModelConfig(path=path))
    message = "has experts in 1 of 2 layers and a head that is tied to the embedding, which SGLang"
    with pytest.raises(ValueError, match=message):
        server_arguments(config, replace(MODEL, num_moe_layers=1), cpu=True, known=KNOWN)


def test_our_keys_are_sglangs_arguments(path: Path) -> None:
    told = arguments(
        path,
        cpu=False,
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
        "model_path": str(path),
        "dtype": "bfloat16",
        "device": "cuda",
        "max_running_requests": 7,
        "tp_size": 2,
        "dp_size": 3,
        "mem_fraction_static": 0.5,
        "chunked_prefill_size": 99,
        "disable_cuda_graph": True,
        "disable_radix_cache": True,
        "skip_tokenizer_init": True,
        "enable_weights_cpu_backup": True,
    }
    assert {name: told[name] for name in wanted} == wanted
    assert "max_total_tokens" not in told and "attention_backend" not in told


def test_sglang_gets_more_context_than_is_used(path: Path) -> None:
    """It takes no prompt of its context's length less six, nor fills the rest."""
    assert arguments(path)["context_length"] == 512 + 8


def test_the_cache_on_a_cpu_is_counted_in_tokens(path: Path) -> None:
    token_bytes = 2 * 2 * 2 * 8 * 4
    assert kv_bytes_per_token(path, ElementType.FLOAT32) == token_bytes
    assert arguments(path, kv_cache_bytes=1000 * token_bytes)["max_total_tokens"] == 1000
    modest = arguments(path, max_num_seqs=2)["max_total_tokens"]
    assert modest == 4 * 2 * 520
    with pytest.raises(ValueError, match=f"holds 10 tokens .* one context takes {520 * 256} bytes"):
        arguments(path, kv_cache_bytes=10 * token_bytes)


def test_a_model_whose_cache_cannot_be_counted_says_what_to_set(path: Path) -> None:
    (path / "config.json").write_text(json.dumps({"num_attention_heads": 4}))
    with pytest.raises(ValueError, match=r"lacks .* set engine_args\.max_total_tokens"):
        arguments(path)
    assert arguments(path, given={"max_total_tokens": 4096})["max_total_tokens"] == 4096


def test_engine_args_win_over_defaults_and_not_over_keys(path: Path) -> None:
    assert arguments(path, given={"attention_backend": "triton"})["attention_backend"] == "triton"
    assert arguments(path, given={"stream_interval": 4})["stream_interval"] == 4
    with pytest.raises(ValueError, match=r"engine_args\.model_path is set by .*: set model\.path"):
        arguments(path, given={"model_path": "x"})
    with pytest.raises(ValueError, match=r"atention_backend is not .* mean attention_backend"):
        arguments(path, given={"atention_backend": "x"})
    with pytest.raises(ValueError, match=r"engine_args\.speculative_algorithm is not supported"):
        arguments(path, given={"speculative_algorithm": "EAGLE"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prefix_cache_bytes", 1),
        ("gpu_memory_utilization", 0.5),
        ("tensor_model_parallel_size", 2),
        ("data_parallel_size", 2),
    ],
)
def test_what_a_cpu_does_not_support_is_refused(path: Path, key: str, value: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"model\.{key} is {value}, which engine 'sglang' does not support"
    ):
        arguments(path, **{key: value})


def test_constraints_need_a_tokenizer_and_xgrammar(path: Path) -> None:
    config = ServerConfig(model=ServedModelConfig(path=path))
    assert not constrains(config)
    assert arguments(path)["grammar_backend"] == "none"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_text("{}")
    assert constrains(config)
    assert arguments(path)["grammar_backend"] == "xgrammar"
    without = {"grammar_backend": "none"}
    assert not constrains(config.model_copy(update={"engine_args": without}))
    assert arguments(path, given=without)["grammar_backend"] == "none"
    with pytest.raises(ValueError, match="'llguidance', which reads other grammars"):
        arguments(path, given={"grammar_backend": "llguidance"})
