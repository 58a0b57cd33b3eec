"""Start-up of a process: stubs for missing kernels, and the entry of a scheduler process.

Invariant: a scheduler process enters through `run_scheduler`, prepared as its parent was. No
installed module is replaced: a stub is used only if the import would fail without it, and a
call of one of its functions raises an error that names the missing kernel.

A spawned process unpickles the function to call, then its arguments, then calls it. SGLang's own
classes are among the arguments, so the process must be prepared by the first object that it
unpickles: a `ProcessSetup` prepares the process in which it is unpickled. This module must not
import sglang.
"""

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from treadle.rollout_server.engines.common.die_with_parent import die_with_parent

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""Operators that torchvision's Python code registers fake implementations for unconditionally."""

_Library: Any = torch.library.Library  # Untyped in torch.
_libraries: list[Any] = []  # A schema is removed with its library.


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

    worker.run(setup.report, *arguments)


def install_stubs() -> None:
    """Installs stubs for torchvision's operators and ``sgl_kernel`` if they are missing."""
    if importlib.util.find_spec("torchvision") is not None:
        _make_torchvision_importable()
    if "sgl_kernel" not in sys.modules and importlib.util.find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = MissingKernels("sgl_kernel")


def _make_torchvision_importable() -> None:
    """Imports torchvision; defines the schemas it needs if its compiled part is missing."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library: Any = _Library("torchvision", "FRAGMENT")
        for schema in _SCHEMAS:
            library.define(schema)
        _libraries.append(library)
        importlib.import_module("torchvision")


class MissingKernels(ModuleType):
    """A module from which every name can be imported but none can be called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(
                f"{self.__name__}.{name} has no CPU build here: this model or setting needs "
                f"a GPU, or a CPU build of {self.__name__}"
            )

        return missing
