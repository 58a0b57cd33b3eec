"""Start-up of a process: stubs for missing kernels, and the entry of a scheduler process.

Invariant: a scheduler process enters through `run_scheduler`, prepared as its parent was.

A spawned process unpickles the function to call, then its arguments, then calls it. SGLang's own
classes are among the arguments, so the process must be prepared by the first object that it
unpickles: a `ProcessSetup` prepares the process in which it is unpickled. This module must not
import sglang.
"""

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.rollout_server.engines.common.die_with_parent import die_with_parent
from treadle.rollout_server.engines.common.missing_modules import (
    MissingKernels,
    make_torchvision_importable,
)


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """Prepares a process of this engine, when it is created or unpickled there.

    Attributes:
        cpu: Whether SGLang computes on the CPU, which needs stubs for some kernels.
        reports: Directory in which a process that fails writes the cause to a file named by
            its process id.
    """

    cpu: bool
    reports: Path

    def __post_init__(self) -> None:
        if self.cpu:
            install_stubs()

    def __reduce__(self) -> tuple[type["ProcessSetup"], tuple[bool, Path]]:
        return ProcessSetup, (self.cpu, self.reports)

    def report(self, error: BaseException) -> None:
        """Writes down why this process ends."""
        path = self.reports / str(os.getpid())
        path.write_text(f"{type(error).__name__}: {error}")


def run_scheduler(setup: ProcessSetup, *arguments: Any) -> None:
    """Entry point of a scheduler process; takes the arguments of SGLang's own."""
    die_with_parent()
    from treadle.rollout_server.engines.sglang import worker

    if setup.cpu:
        worker.replace_expert_kernels()
    worker.run(setup.report, *arguments)


def install_stubs() -> None:
    """Installs stubs for torchvision's operators and ``sgl_kernel`` if they are missing."""
    make_torchvision_importable()
    if "sgl_kernel" not in sys.modules and importlib.util.find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = MissingKernels("sgl_kernel")
