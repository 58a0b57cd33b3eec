"""The arguments: a server's configuration -> keywords of SGLang's `ServerArgs`.

Invariant: what is computed here is the whole of what SGLang is told, and a setting that it
could not honour, or that would take sampling away from `sampling.py`, is refused. Needs no
sglang: the names of its arguments are given.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import ElementType, ModelInfo
from treadle.rollout_server.engines.common.arguments import (
    OwnArgument,
    merged_arguments,
    refuse_unhonoured,
)

CONTEXT_MARGIN = 8
"""SGLang ends sequences up to seven tokens before its context is full; ours may fill it."""

_CPU_KV_CACHE_BYTES = 1 << 30  # SGLang's own choice is most of the host's memory.
_CPU_KV_CONTEXTS = 4  # Nor more than so many full contexts for each sequence.
_UNHONOURED = {
    "model.prefix_cache_bytes": "the KV cache holds its prefixes, set model.kv_cache_bytes",
    "model.image_cache_bytes": "it takes no images, leave it out",
}
_CPU_UNHONOURED = {
    "model.gpu_memory_utilization": "it runs on the CPU, set model.kv_cache_bytes",
    "model.tensor_model_parallel_size": "its collectives have no CPU build, leave it out",
    "model.data_parallel_size": "SGLang's process that deals requests out to the copies does not "
    "import on a CPU, start more servers and leave it out",
}
_NOT_OURS = {
    "speculative_": "drafts would be accepted by another distribution than the one reported",
    "disaggregation_": "one server reads prompts and samples",
    "pp_": "weights come to one rank per tensor-parallel part",
}
"""Beginnings of names that are refused in ``engine_args`` -> why."""


def server_arguments(
    config: ServerConfig, model: ModelInfo, *, cpu: bool, known: Collection[str]
) -> dict[str, Any]:
    """What to construct `ServerArgs` with.

    Args:
        config: What was asked for.
        model: Of `config.model.path`.
        cpu: Whether SGLang computes on the CPU.
        known: The names of `ServerArgs`.

    Raises:
        ValueError: A setting cannot be honoured, or an argument is unknown or taken.
    """
    refuse_unhonoured(config, "sglang", _UNHONOURED | (_CPU_UNHONOURED if cpu else {}))
    for name in config.engine_args:
        for prefix, why in _NOT_OURS.items():
            if name.startswith(prefix):
                raise ValueError(f"engine_args.{name} cannot be used here: {why}; leave it out")
    own = _own_arguments(config, model, cpu=cpu)
    merged = merged_arguments(
        own, config.engine_args, known=known, argument_class="sglang's ServerArgs"
    )
    return _defaults(config, cpu=cpu) | merged


def kv_bytes_per_token(directory: Path, element_type: ElementType) -> int:
    """Bytes of keys and values of one token, over all layers.

    Raises:
        ValueError: ``config.json`` does not say how the model's attention is shaped.
    """
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config |= config.get("text_config") or {}
    try:
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        layers = config["num_hidden_layers"]
    except KeyError as error:
        raise ValueError(
            f"{path} lacks {error}, so model.kv_cache_bytes cannot be counted in tokens: "
            "leave it out and set engine_args.max_total_tokens"
        ) from None
    return int(2 * layers * kv_heads * head_dim * element_type.size_bytes)


def _own_arguments(config: ServerConfig, model: ModelInfo, *, cpu: bool) -> dict[str, OwnArgument]:
    settings = config.model
    own = {
        "model_path": OwnArgument(value=str(settings.path), key="model.path"),
        "dtype": OwnArgument(value=settings.dtype, key="model.dtype"),
        "context_length": OwnArgument(
            value=model.context_length + CONTEXT_MARGIN, key="model.context_length"
        ),
        "device": OwnArgument(value="cpu" if cpu else "cuda", key="model.device"),
        "max_running_requests": OwnArgument(value=settings.max_num_seqs, key="model.max_num_seqs"),
        "tp_size": OwnArgument(
            value=settings.tensor_model_parallel_size, key="model.tensor_model_parallel_size"
        ),
        "dp_size": OwnArgument(value=settings.data_parallel_size, key="model.data_parallel_size"),
        "disable_cuda_graph": OwnArgument(
            value=cpu or settings.enforce_eager, key="model.enforce_eager"
        ),
        "disable_radix_cache": OwnArgument(
            value=not settings.enable_prefix_caching, key="model.enable_prefix_caching"
        ),
        "log_level": OwnArgument(value=config.log_level.lower(), key="log_level"),
        "skip_tokenizer_init": OwnArgument(value=True),
        "tokenizer_worker_num": OwnArgument(value=1),
        "incremental_streaming_output": OwnArgument(value=False),
        "sampling_backend": OwnArgument(value="pytorch"),
    }
    if settings.gpu_memory_utilization is not None:
        own["mem_fraction_static"] = OwnArgument(
            value=settings.gpu_memory_utilization, key="model.gpu_memory_utilization"
        )
    if settings.max_num_batched_tokens is not None:
        own["chunked_prefill_size"] = OwnArgument(
            value=settings.max_num_batched_tokens, key="model.max_num_batched_tokens"
        )
    asked = settings.kv_cache_bytes
    if asked is not None or (cpu and "max_total_tokens" not in config.engine_args):
        own["max_total_tokens"] = OwnArgument(
            value=_kv_tokens(config, model), key="model.kv_cache_bytes"
        )
    return own


def _kv_tokens(config: ServerConfig, model: ModelInfo) -> int:
    """Tokens that the KV cache holds: what was asked for, or a modest choice."""
    settings = config.model
    assert settings.path is not None
    token_bytes = kv_bytes_per_token(settings.path, ElementType(settings.dtype))
    least = model.context_length + CONTEXT_MARGIN
    if settings.kv_cache_bytes is None:
        most = _CPU_KV_CONTEXTS * settings.max_num_seqs * least
        return max(least, min(_CPU_KV_CACHE_BYTES // token_bytes, most))
    tokens = settings.kv_cache_bytes // token_bytes
    if tokens < least:
        raise ValueError(
            f"model.kv_cache_bytes is {settings.kv_cache_bytes}, which holds {tokens} tokens of "
            f"{token_bytes} bytes: one context takes {least * token_bytes} bytes, give as many "
            "or lower model.context_length"
        )
    return tokens


def _defaults(config: ServerConfig, *, cpu: bool) -> dict[str, Any]:
    """What ``engine_args`` may change."""
    defaults: dict[str, Any] = {
        "sleep_on_idle": True,  # Else an idle or paused scheduler keeps a core busy.
        "skip_server_warmup": True,
        "grammar_backend": "none",
    }
    if cpu:
        # The kernels of the other backends are not there, and nothing overlaps with a CPU.
        return defaults | {"attention_backend": "torch_native", "disable_overlap_schedule": True}
    # Released weights go to host memory and come back as they were.
    return defaults | {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
