"""Translates a `ServerConfig` to vLLM's engine arguments.

Invariant: pure, and does not import vLLM. The library's defaults hold unless one of our keys or
`engine_args` sets an argument, except for the arguments listed here, each with its reason.
"""

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import ModelInfo
from treadle.rollout_server.engines.common.arguments import (
    ManagedArgument,
    experts_are_reported,
)
from treadle.rollout_server.engines.constraints import has_tokenizer

WORKER_EXTENSION = "treadle.rollout_server.engines.vllm.worker.WorkerExtension"

UNSUPPORTED = {
    "model.prefix_cache_bytes": "set model.kv_cache_bytes or model.gpu_memory_utilization",
    "model.max_draft_tokens": "only the torch engine drafts, leave it out",
    "model.batch_invariant": "only the torch engine has it, leave it out",
}
"""Keys that vLLM does not support -> what to do instead."""

SCHEDULER = "treadle.rollout_server.engines.vllm.routed_experts.make_scheduler"
"""Of an engine that reports the experts that the model chose."""

_WITHOUT_EXPERTS = (
    "decode_context_parallel_size",
    "distributed_executor_backend",  # Ours prepares the workers.
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "scheduler_cls",
)
_CPU_KV_CACHE_BYTES = 1 << 30  # vLLM's default is nearly all of the machine's memory.


def reports_experts(config: ServerConfig, model: ModelInfo) -> bool:
    """Returns whether vLLM reports the experts that the model chooses; see `routed_experts.py`.

    Raises:
        ValueError: `engine_args` demand it, and it cannot.
    """
    given = config.engine_args
    problems = [f"engine_args.{name} is set" for name in _WITHOUT_EXPERTS if name in given]
    if not config.model.enable_prefix_caching:  # vLLM keeps the experts with its prefix cache.
        problems.append("model.enable_prefix_caching is false")
    return experts_are_reported(config, model, problems)


def managed_arguments(
    config: ServerConfig,
    *,
    context_length: int,
    on_cpu: bool,
    routed_experts: bool = False,
    vision: object = None,
) -> dict[str, ManagedArgument]:
    """Returns the arguments of `AsyncEngineArgs` that the server sets.

    Args:
        context_length: Maximum number of tokens of prompt plus completion.
        on_cpu: Whether this build of vLLM computes on the CPU.
        vision: The `VisionSetup` of a model that takes images.
    """
    model = config.model
    kv_cache_bytes = model.kv_cache_bytes
    if on_cpu and kv_cache_bytes is None and model.gpu_memory_utilization is None:
        kv_cache_bytes = _CPU_KV_CACHE_BYTES
    by_key = {
        "model": ("model.path", str(model.path)),
        "dtype": ("model.dtype", model.dtype),
        "max_model_len": ("model.context_length", context_length),
        "max_num_seqs": ("model.max_num_seqs", model.max_num_seqs),
        "tensor_parallel_size": (
            "model.tensor_model_parallel_size",
            model.tensor_model_parallel_size,
        ),
        "data_parallel_size": ("model.data_parallel_size", model.data_parallel_size),
        "gpu_memory_utilization": ("model.gpu_memory_utilization", model.gpu_memory_utilization),
        "kv_cache_memory_bytes": ("model.kv_cache_bytes", kv_cache_bytes),
        "max_num_batched_tokens": ("model.max_num_batched_tokens", model.max_num_batched_tokens),
        "enable_prefix_caching": ("model.enable_prefix_caching", model.enable_prefix_caching),
        # On the CPU, compilation takes minutes and gains a tenth.
        "enforce_eager": ("model.enforce_eager", model.enforce_eager or on_cpu),
    }
    fixed: dict[str, object] = {
        # Token ids in, token ids out; only constraints are of text.
        "skip_tokenizer_init": not has_tokenizer(config),
        "scheduling_policy": "priority",
        "generation_config": "vllm",  # Requests carry all their settings.
        "worker_extension_cls": WORKER_EXTENSION,
        "enable_sleep_mode": not on_cpu,
        "speculative_config": None,  # Our sampler samples one token at a time.
        "logits_processors": None,  # Our sampler applies none after the temperature.
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    if routed_experts:
        fixed["scheduler_cls"] = SCHEDULER
    if vision is not None:
        fixed["additional_config"] = vision  # Prepares vLLM's processes.
        fixed["mm_processor_cache_gb"] = 0  # Images are cached before they are cut into patches.
        fixed["mm_device_do_normalize"] = False  # Patches are normalised as transformers does.
    return {
        **{name: ManagedArgument(value=value, key=key) for name, (key, value) in by_key.items()},
        **{name: ManagedArgument(value=value) for name, value in fixed.items()},
    }
