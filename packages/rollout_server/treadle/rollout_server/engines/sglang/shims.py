"""The shims: what SGLang imports and a CPU has no build of, stood in for.

Invariant: nothing that is installed is replaced. A stand-in takes part only where the import
fails without it, and whoever calls one of its functions learns which kernel is missing.

Who calls: `startup.py`, once per process and before sglang is imported there, on the CPU only.
"""

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""Operators of torchvision that its Python part describes without asking whether they exist."""

_Library: Any = torch.library.Library  # torch does not annotate it.
_libraries: list[Any] = []  # A schema is gone with its library.


def install() -> None:
    """Stands in for torchvision's operators and for ``sgl_kernel``, where they are missing."""
    if importlib.util.find_spec("torchvision") is not None:
        _make_torchvision_importable()
    if "sgl_kernel" not in sys.modules and importlib.util.find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = MissingKernels("sgl_kernel")


def _make_torchvision_importable() -> None:
    """Imports torchvision; without its compiled part, gives it the schemas it asks for."""
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
    """A module of which every name can be imported and none can be called."""

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
