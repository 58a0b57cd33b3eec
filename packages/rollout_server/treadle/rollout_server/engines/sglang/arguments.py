"""Translates a server's configuration to keywords of SGLang's `ServerArgs`.

Invariant: SGLang gets exactly these arguments. A setting that it does not support, or that would
bypass `sampling.py`, is rejected. This module does not import sglang: its argument names are
passed in.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import ElementType, ModelInfo
from treadle.rollout_server.engines.common.arguments import (
    EXPERTS_ARGUMENT,
    ManagedArgument,
    experts_are_reported,
    merge_arguments,
    reject_unsupported,
)
from treadle.rollout_server.engines.constraints import has_tokenizer

CONTEXT_MARGIN = 8
"""SGLang ends sequences up to seven tokens before its context is full; ours may fill it."""

_CPU_KV_CACHE_BYTES = 1 << 30  # SGLang's default is most of the host's memory.
_CPU_KV_CONTEXTS = 4  # Maximum number of full contexts per sequence.
_UNSUPPORTED = {
    "model.prefix_cache_bytes": "prefixes are in the KV cache, set model.kv_cache_bytes",
    "model.max_draft_tokens": "only the torch engine drafts, leave it out",
    "model.batch_invariant": "only the torch engine has it, leave it out",
}
_CPU_UNSUPPORTED = {
    "model.gpu_memory_utilization": "it runs on the CPU, set model.kv_cache_bytes",
    "model.tensor_model_parallel_size": "its collectives have no CPU build, leave it out",
    "model.data_parallel_size": "SGLang's data parallel controller cannot be imported on a CPU, "
    "leave it out and start more servers",
}
_FORBIDDEN_PREFIXES = {
    "speculative_": "drafts would be accepted under a distribution other than the reported one",
    "disaggregation_": "one server does both prefill and decode",
    "pp_": "weight updates need one rank per tensor-parallel part",
}
"""Prefix of a name that ``engine_args`` may not have -> reason."""


def server_arguments(
    config: ServerConfig, model: ModelInfo, *, cpu: bool, known: Collection[str]
) -> dict[str, Any]:
    """Returns the keywords of `ServerArgs`.

    Args:
        cpu: Whether SGLang computes on the CPU.
        known: The argument names of `ServerArgs`.

    Raises:
        ValueError: A setting is not supported, or an argument is unknown or set by the server.
    """
    reject_unsupported(config, "sglang", _UNSUPPORTED | (_CPU_UNSUPPORTED if cpu else {}))
    for name in config.engine_args:
        for prefix, why in _FORBIDDEN_PREFIXES.items():
            if name.startswith(prefix):
                raise ValueError(f"engine_args.{name} is not supported: {why}; leave it out")
    assert config.model.path is not None
    _check_experts(config.model.path, model)
    own = _managed_arguments(config, model, cpu=cpu)
    merged = merge_arguments(
        own, config.engine_args, known=known, argument_class="sglang's ServerArgs"
    )
    arguments = _defaults(config, model, cpu=cpu) | merged
    if (backend := arguments["grammar_backend"]) not in ("none", "xgrammar"):
        raise ValueError(
            f"engine_args.grammar_backend is {backend!r}, which reads other grammars than those of "
            "the contract: leave it out, or set 'xgrammar' or 'none'"
        )
    return arguments


def reports_experts(config: ServerConfig, model: ModelInfo) -> bool:
    """Returns whether SGLang reports the experts that the model chooses.

    Raises:
        ValueError: `engine_args` demand it, and it cannot.
    """
    # Its memory for those of one step is as large as a chunk.
    whole = config.engine_args.get("chunked_prefill_size") == -1
    problems = ["engine_args.chunked_prefill_size is -1"] if whole else []
    return experts_are_reported(config, model, problems)


def constrains(config: ServerConfig) -> bool:
    """Returns whether the server constrains the sampling; its workers do so by xgrammar's masks."""
    default = "xgrammar" if has_tokenizer(config) else "none"
    return bool(config.engine_args.get("grammar_backend", default) == "xgrammar")


def kv_bytes_per_token(directory: Path, element_type: ElementType) -> int:
    """Returns the bytes of the keys and values of one token in all layers.

    Raises:
        ValueError: ``config.json`` lacks the shape of the model's attention.
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
            f"{path} lacks {error}, so model.kv_cache_bytes cannot be converted to tokens: "
            "leave it out and set engine_args.max_total_tokens"
        ) from None
    return int(2 * layers * kv_heads * head_dim * element_type.size_bytes)


def _check_experts(directory: Path, model: ModelInfo) -> None:
    """Refuses a model with experts that SGLang would compute as another one."""
    if not model.num_moe_layers:
        return
    config = json.loads((directory / "config.json").read_text())
    problems = []
    if model.num_moe_layers < (num_layers := config["num_hidden_layers"]):
        problems.append(f"experts in {model.num_moe_layers} of {num_layers} layers")
    if config.get("tie_word_embeddings"):
        problems.append("a head that is tied to the embedding")
    if problems:
        raise ValueError(
            f"{directory} has {' and '.join(problems)}, which SGLang does not compute in a "
            f"{model.architecture}: use the vllm or torch engine"
        )


def _managed_arguments(
    config: ServerConfig, model: ModelInfo, *, cpu: bool
) -> dict[str, ManagedArgument]:
    settings = config.model
    own = {
        "model_path": ManagedArgument(value=str(settings.path), key="model.path"),
        "dtype": ManagedArgument(value=settings.dtype, key="model.dtype"),
        "context_length": ManagedArgument(
            value=model.context_length + CONTEXT_MARGIN, key="model.context_length"
        ),
        "device": ManagedArgument(value="cpu" if cpu else "cuda", key="model.device"),
        "max_running_requests": ManagedArgument(
            value=settings.max_num_seqs, key="model.max_num_seqs"
        ),
        "tp_size": ManagedArgument(
            value=settings.tensor_model_parallel_size, key="model.tensor_model_parallel_size"
        ),
        "dp_size": ManagedArgument(
            value=settings.data_parallel_size, key="model.data_parallel_size"
        ),
        "disable_cuda_graph": ManagedArgument(
            value=cpu or settings.enforce_eager, key="model.enforce_eager"
        ),
        "disable_radix_cache": ManagedArgument(
            value=not settings.enable_prefix_caching, key="model.enable_prefix_caching"
        ),
        "log_level": ManagedArgument(value=config.log_level.lower(), key="log_level"),
        "skip_tokenizer_init": ManagedArgument(value=True),
        "tokenizer_worker_num": ManagedArgument(value=1),
        "incremental_streaming_output": ManagedArgument(value=False),
        "sampling_backend": ManagedArgument(value="pytorch"),
    }
    if settings.gpu_memory_utilization is not None:
        own["mem_fraction_static"] = ManagedArgument(
            value=settings.gpu_memory_utilization, key="model.gpu_memory_utilization"
        )
    if settings.max_num_batched_tokens is not None:
        own["chunked_prefill_size"] = ManagedArgument(
            value=settings.max_num_batched_tokens, key="model.max_num_batched_tokens"
        )
    asked = settings.kv_cache_bytes
    if asked is not None or (cpu and "max_total_tokens" not in config.engine_args):
        own["max_total_tokens"] = ManagedArgument(
            value=_kv_tokens(config, model), key="model.kv_cache_bytes"
        )
    return own


def _kv_tokens(config: ServerConfig, model: ModelInfo) -> int:
    """Returns the number of tokens in the KV cache: as configured, or a moderate default."""
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
            f"{token_bytes} bytes: one context takes {least * token_bytes} bytes, set at least "
            "that or lower model.context_length"
        )
    return tokens


def _defaults(config: ServerConfig, model: ModelInfo, *, cpu: bool) -> dict[str, Any]:
    """Returns the defaults that ``engine_args`` may override."""
    defaults: dict[str, Any] = {
        "sleep_on_idle": True,  # Otherwise an idle or paused scheduler keeps a core busy.
        "skip_server_warmup": True,
        "grammar_backend": "xgrammar" if constrains(config) else "none",
        EXPERTS_ARGUMENT: reports_experts(config, model),
    }
    if cpu:
        # The other attention backends have no CPU kernels, and there is no device to overlap with.
        return defaults | {"attention_backend": "torch_native", "disable_overlap_schedule": True}
    # Released weights move to host memory and are restored from there.
    return defaults | {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
