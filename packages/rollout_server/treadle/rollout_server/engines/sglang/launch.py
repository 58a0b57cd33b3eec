"""The launch: a configuration -> an SGLang engine that is ready, or the reason why there is none.

Invariant: the event loop never waits: sglang is imported and started on a thread of its own,
which lives as long as the engine. Whoever gives up, by an error or by cancelling, leaves no
process behind.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from typing import Any

import torch

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import EngineCapabilities, EngineInfo, ModelInfo
from treadle.rollout_server.engines.common.cancellable_startup import built
from treadle.rollout_server.engines.common.parameters import held_parameters
from treadle.rollout_server.engines.common.runtime_dir import Scratch
from treadle.rollout_server.engines.sglang import startup
from treadle.rollout_server.engines.sglang.arguments import server_arguments
from treadle.rollout_server.engines.sglang.engine import SglangEngine
from treadle.rollout_server.model_files import read_model

_KNOWN_VERSION = "0.5.21"  # Its scheduler is extended, not only called.
_INSTALL = "pip install 'treadle-rollout-server[sglang]' into an environment of its own"


async def create(config: ServerConfig) -> SglangEngine:
    """Builds the engine that a configuration asks for.

    Raises:
        ValueError: No model is named, sglang is not there, or it cannot be had as configured.
        OSError: The model's files are not there.
    """
    settings = config.model
    if settings.path is None:
        raise ValueError("engine 'sglang' needs a model: give --model.path DIRECTORY")
    model = read_model(settings.path, context_length=settings.context_length)
    parameters = held_parameters(settings.path, settings.dtype)
    version = _known_version()
    cpu = _computes_on_cpu(config)
    startup.set_environment(
        architecture=model.architecture, cpu=cpu, num_threads=settings.num_threads
    )
    schedulers = await _started(config, model, cpu=cpu)
    if schedulers.max_prompt_tokens < model.context_length:
        await schedulers.aclose()
        raise ValueError(
            f"the KV cache has room for a prompt of {schedulers.max_prompt_tokens} tokens, and "
            f"model.context_length is {model.context_length}: lower it, or raise "
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
            release_memory=cpu or config.engine_args.get("enable_memory_saver", True) is True,
        ),
        model=model,
        parameters=parameters,
        num_workers=settings.tensor_model_parallel_size * settings.data_parallel_size,
    )
    places = settings.max_num_seqs * settings.data_parallel_size
    return SglangEngine(info, schedulers, places=places, host_cache=cpu)


def _known_version() -> str:
    try:
        version = package_version("sglang")
    except PackageNotFoundError:
        raise ValueError(f"engine 'sglang' needs sglang, which is not here: {_INSTALL}") from None
    if version != _KNOWN_VERSION:
        raise ValueError(f"sglang is {version}, this adapter knows {_KNOWN_VERSION}: {_INSTALL}")
    return version


def _computes_on_cpu(config: ServerConfig) -> bool:
    device = config.model.device
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise ValueError(
            "model.device is 'cuda' and torch sees no GPU: check nvidia-smi and that this "
            "environment has a CUDA build of torch, or set model.device=cpu"
        )
    return device == "cpu" or not there


async def _started(config: ServerConfig, model: ModelInfo, *, cpu: bool) -> Any:
    """A `process.Schedulers`; cancelled, it ends what it started."""
    scratch = Scratch()
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sglang")
    build = partial(_build, config, model, cpu, scratch, thread)
    try:
        return await built(build, discard=_close, executor=thread)
    except BaseException:
        thread.shutdown(wait=False)
        scratch.close()
        raise


async def _close(schedulers: Any) -> None:
    await schedulers.aclose()


def _build(
    config: ServerConfig, model: ModelInfo, cpu: bool, scratch: Scratch, thread: ThreadPoolExecutor
) -> Any:
    reports = scratch.path / "reports"  # Apart from SGLang's sockets.
    reports.mkdir()
    if config.model.tensor_model_parallel_size * config.model.data_parallel_size == 1:
        startup.meet_at(scratch.path / "rank")
    setup = startup.ProcessSetup(cpu, reports)
    process = startup.import_process()
    arguments = server_arguments(config, model, cpu=cpu, known=process.ARGUMENT_NAMES)
    return process.Schedulers(arguments, setup, thread, scratch)
