"""Stand-ins for modules without a CPU build: torchvision, and libraries of kernels.

Model files of vLLM and SGLang import them, and none of the code that runs here calls them.

Invariant: no installed module is replaced. A stand-in is used only if the import would fail
without it, and a call of one of its functions raises an error that names what is missing.
"""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""Operators that torchvision's Python code registers fake implementations for unconditionally."""

_TORCHVISION = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)
"""The modules that the image processors of transformers import."""

_Library: Any = torch.library.Library  # Untyped in torch.
_libraries: list[Any] = []  # A schema is removed with its library.


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


def make_torchvision_importable() -> None:
    """Imports torchvision, if it is installed; defines the schemas that a CPU build lacks."""
    if importlib.util.find_spec("torchvision") is None:
        return
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


@contextlib.contextmanager
def torchvision_stand_in() -> Iterator[None]:
    """Lets modules import torchvision's transforms in this block, if it is not installed.

    Afterwards torchvision is missing again, for code that looks whether it is there.
    """
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    modules = {name: MissingKernels(name) for name in _TORCHVISION}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
