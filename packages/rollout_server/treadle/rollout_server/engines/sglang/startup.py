"""Start-up: what holds in a process before sglang is imported, and the scheduler's entry.

Invariant: the environment is written here and nowhere else in this engine, before anything of
SGLang runs; a scheduler process enters through `run_scheduler`, prepared as its parent was.

A spawned process unpickles what it is to call, then with what, then calls it. SGLang's own
classes are among the arguments, so a process must be prepared by the very first thing that it
unpickles: a `ProcessSetup` prepares the process that it arrives in.
"""

import asyncio
import importlib.util
import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from treadle.rollout_server.engines.common.die_with_parent import end_with_parent
from treadle.rollout_server.engines.sglang import shims


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """How a process of this engine is prepared; done by making or unpickling one.

    Attributes:
        cpu: Whether SGLang computes on the CPU, where kernels are stood in for.
        reports: Directory in which a process that fails leaves the cause, under its id.
    """

    cpu: bool
    reports: Path

    def __post_init__(self) -> None:
        if self.cpu:
            shims.install()

    def __reduce__(self) -> tuple[type["ProcessSetup"], tuple[bool, Path]]:
        return ProcessSetup, (self.cpu, self.reports)

    def report(self, error: BaseException) -> None:
        """Leaves word of why this process ends."""
        path = self.reports / str(os.getpid())
        path.write_text(f"{type(error).__name__}: {error}")


def set_environment(*, architecture: str, cpu: bool, num_threads: int | None) -> None:
    """Sets what SGLang reads from the environment, for this process and those it starts.

    Args:
        architecture: Of the model, "Qwen2ForCausalLM".
        cpu: Whether SGLang computes on the CPU.
        num_threads: Of a worker, on the CPU; None: the library's choice.
    """
    if cpu:
        # Else its rotary embedding imports another library's kernels.
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # SGLang's own bound lies a few tokens above ours, see `arguments.CONTEXT_MARGIN`.
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    # Else a worker imports all models, which takes as long as the rest of its start.
    others = modules_without(architecture, _models_directory())
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(others))
    if num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)


def meet_at(path: Path) -> None:
    """Has the rank of a server that has only one meet itself at a file.

    Else at a port that SGLang found free in the server and listens at when its scheduler has
    been imported: by then it may be another process's.
    """
    os.environ.setdefault("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", f"file://{path}")


def modules_without(name: str, directory: Path) -> list[str]:
    """Modules of a package that do not mention a name; none if it is mentioned nowhere."""
    texts = {path.stem: path.read_text() for path in sorted(directory.glob("*.py"))}
    others = [module for module, text in texts.items() if name not in text]
    return others if len(others) < len(texts) else []


def _models_directory() -> Path:
    spec = importlib.util.find_spec("sglang")  # Found, not imported.
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "srt" / "models"


def import_process() -> ModuleType:
    """Imports `process.py`, and with it sglang, which replaces the event loop's policy."""
    policy = asyncio.get_event_loop_policy()
    try:
        return import_module("treadle.rollout_server.engines.sglang.process")
    finally:
        asyncio.set_event_loop_policy(policy)


def run_scheduler(setup: ProcessSetup, *arguments: Any) -> None:
    """Entry of a scheduler process; takes what `sglang...run_scheduler_process` takes."""
    end_with_parent()
    from treadle.rollout_server.engines.sglang import worker

    worker.run(setup, *arguments)
