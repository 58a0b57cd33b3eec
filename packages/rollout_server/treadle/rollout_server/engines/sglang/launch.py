"""Starts an SGLang engine from a configuration.

Invariant: the event loop never blocks: sglang is imported and started on a separate thread,
which lives as long as the engine. A start that fails or is cancelled leaves no process behind.
Only this module of the engine writes the environment, before any code of SGLang runs.
"""

import asyncio
import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import ElementType, EngineCapabilities, EngineInfo, ModelInfo
from treadle.rollout_server.engines.common import shm_cleaner
from treadle.rollout_server.engines.common.cancellable_startup import cancellable_startup
from treadle.rollout_server.engines.common.checkpoint_parameters import checkpoint_parameters
from treadle.rollout_server.engines.common.element_types import TORCH_DTYPES
from treadle.rollout_server.engines.common.runtime_dir import RuntimeDir
from treadle.rollout_server.engines.images.model_types import takes_images
from treadle.rollout_server.engines.sglang.arguments import (
    constrains,
    reports_experts,
    server_arguments,
)
from treadle.rollout_server.engines.sglang.engine import SglangEngine
from treadle.rollout_server.engines.sglang.startup import ProcessSetup, install_stubs
from treadle.rollout_server.model_files import read_model

if TYPE_CHECKING:
    from treadle.rollout_server.engines.images.inputs import ImageInputs

_KNOWN_VERSION = "0.5.21"  # Exact, because its scheduler is subclassed.
_INSTALL = "pip install 'treadle-rollout-server[sglang]' into a separate environment"


async def create(config: ServerConfig) -> SglangEngine:
    """Builds the engine of a configuration.

    Raises:
        ValueError: `model.path` is not set, sglang is not installed, or SGLang does not support
            the configuration.
        OSError: The model files are missing.
    """
    settings = config.model
    if settings.path is None:
        raise ValueError("engine 'sglang' needs a model: set --model.path DIRECTORY")
    model = read_model(settings.path, context_length=settings.context_length)
    parameters = checkpoint_parameters(settings.path, settings.dtype)
    version = _known_version()
    cpu = _computes_on_cpu(config)
    images = await asyncio.to_thread(_open_images, config, cpu=cpu)
    set_environment(architecture=model.architecture, cpu=cpu, num_threads=settings.num_threads)
    schedulers = await _start_schedulers(config, model, cpu=cpu)
    if schedulers.max_prompt_tokens < model.context_length:
        await schedulers.aclose()
        raise ValueError(
            f"model.context_length is {model.context_length}, but the KV cache only fits a prompt "
            f"of {schedulers.max_prompt_tokens} tokens: lower it, or raise "
            "model.kv_cache_bytes (without a GPU) or model.gpu_memory_utilization"
        )
    info = EngineInfo(
        name="sglang",
        version=version,
        capabilities=EngineCapabilities(
            sampled_logprobs=True,
            priority=True,
            in_flight_continue=True,
            collective=True,
            prompt_logprobs=True,
            sampling_mask=True,
            images=images is not None,
            constrained_sampling=constrains(config),
            routed_experts=reports_experts(config, model),
            release_memory=cpu or config.engine_args.get("enable_memory_saver", True) is True,
        ),
        model=model,
        parameters=parameters,
        num_workers=settings.tensor_model_parallel_size * settings.data_parallel_size,
    )
    max_running = settings.max_num_seqs * settings.data_parallel_size
    return SglangEngine(info, schedulers, max_running=max_running, host_cache=cpu, images=images)


def _open_images(config: ServerConfig, *, cpu: bool) -> "ImageInputs | None":
    """Returns the reader of images; None for a text model."""
    model = config.model
    assert model.path is not None
    if not takes_images(model.path):
        return None
    if cpu:
        install_stubs()  # transformers imports torchvision.
    from treadle.rollout_server.engines.images.inputs import ImageInputs

    dtype = TORCH_DTYPES[ElementType(model.dtype)]
    return ImageInputs(model.path, dtype=dtype, cache_bytes=model.image_cache_bytes)


def _known_version() -> str:
    try:
        version = package_version("sglang")
    except PackageNotFoundError:
        raise ValueError(
            f"engine 'sglang' needs sglang, which is not installed: {_INSTALL}"
        ) from None
    if version != _KNOWN_VERSION:
        raise ValueError(
            f"sglang is {version}, but this adapter needs {_KNOWN_VERSION}: {_INSTALL}"
        )
    return version


def _computes_on_cpu(config: ServerConfig) -> bool:
    device = config.model.device
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ValueError(
            "model.device is 'cuda', but torch finds no GPU: check nvidia-smi and that this "
            "environment has a CUDA build of torch, or set model.device=cpu"
        )
    return device == "cpu" or not available


async def _start_schedulers(config: ServerConfig, model: ModelInfo, *, cpu: bool) -> Any:
    """Returns a `process.Schedulers`; on cancellation ends the processes it started."""
    shm_cleaner.start()
    runtime_dir = RuntimeDir()
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sglang")
    build = partial(_build, config, model, cpu, runtime_dir, thread)
    try:
        return await cancellable_startup(build, discard=_close, executor=thread)
    except BaseException:
        thread.shutdown(wait=False)
        runtime_dir.close()
        raise


async def _close(schedulers: Any) -> None:
    await schedulers.aclose()


def _build(
    config: ServerConfig,
    model: ModelInfo,
    cpu: bool,
    runtime_dir: RuntimeDir,
    thread: ThreadPoolExecutor,
) -> Any:
    reports = runtime_dir.path / "reports"  # Separate from SGLang's sockets.
    reports.mkdir()
    if config.model.tensor_model_parallel_size * config.model.data_parallel_size == 1:
        set_rendezvous_file(runtime_dir.path / "rank")
    setup = ProcessSetup(cpu, reports)
    process = import_process()
    arguments = server_arguments(config, model, cpu=cpu, known=process.ARGUMENT_NAMES)
    return process.Schedulers(arguments, setup, thread, runtime_dir)


def set_environment(*, architecture: str, cpu: bool, num_threads: int | None) -> None:
    """Sets SGLang's environment variables, for this process and its children.

    Args:
        architecture: Architecture of the model, such as "Qwen2ForCausalLM".
        cpu: Whether SGLang computes on the CPU.
        num_threads: CPU threads per worker; None means the library's default.
    """
    if cpu:
        # Otherwise its rotary embedding imports another library's kernels.
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        # Otherwise the first image waits for a C++ compiler, for up to minutes.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # SGLang's limit is a few tokens above ours, see `arguments.CONTEXT_MARGIN`.
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    # Otherwise a worker imports all models, which doubles its start time.
    others = modules_without(architecture, _models_directory())
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(others))
    if num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)


def set_rendezvous_file(path: Path) -> None:
    """Makes the only rank of a server use a file for its process group's rendezvous.

    Otherwise SGLang picks a free port in the server and listens on it only once its scheduler is
    imported; by then another process may have taken it.
    """
    os.environ.setdefault("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", f"file://{path}")


def modules_without(name: str, directory: Path) -> list[str]:
    """Returns the modules in a directory without a name; none if no module contains it."""
    texts = {path.stem: path.read_text() for path in sorted(directory.glob("*.py"))}
    others = [module for module, text in texts.items() if name not in text]
    return others if len(others) < len(texts) else []


def _models_directory() -> Path:
    spec = importlib.util.find_spec("sglang")  # Found, not imported.
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "srt" / "models"


def import_process() -> ModuleType:
    """Imports `process.py` with sglang, and restores the event loop policy that sglang replaces."""
    policy = asyncio.get_event_loop_policy()
    try:
        return import_module("treadle.rollout_server.engines.sglang.process")
    finally:
        asyncio.set_event_loop_policy(policy)
