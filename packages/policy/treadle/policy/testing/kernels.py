"""Counts the work of a step on a device: kernels, and waits of the host.

It works on a CPU too, where torch runs the same operations, except that some single GPU kernels
are several there.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_NO_KERNEL: Final = frozenset(
    ("detach", "empty", "empty_like", "new_empty", "empty_strided", "alias", "_unsafe_view")
)
_READS: Final = frozenset(
    ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__")
)
"""Functions of a tensor that return when its numbers are on the host."""


class Kernels(TorchDispatchMode):
    """Counts operations other than views.

    Attributes:
        names: Number of calls of each operation.
        waits: The operations that copy a number to the host.
    """

    def __init__(self) -> None:
        """Begins at nothing."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operation."""
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal"):
            self.waits[name] += 1
        elif not func.is_view and name not in _NO_KERNEL:
            self.names[name] += 1
        return out


class Waits(TorchFunctionMode):
    """Keeps where Python reads a tensor's numbers, which on a GPU waits until they are computed.

    Attributes:
        places: "function file:line" of the innermost frame that is not torch's, in order.
    """

    def __init__(self) -> None:
        """Begins at nothing."""
        super().__init__()
        self.places: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each function of tensors."""
        if (name := getattr(func, "__name__", "")) in _READS:
            frames = [f for f in traceback.extract_stack()[:-1] if "/torch/" not in f.filename]
            self.places.append(f"{name} {frames[-1].filename}:{frames[-1].name}")
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_forward(module: torch.nn.Module) -> Iterator[Callable[[], Counter[str]]]:
    """Counts the kernels of each forward pass of a module inside; gives those of the last one."""
    last: Counter[str] = Counter()
    mode, stack = Kernels(), ExitStack()

    def begin(*_: Any) -> None:
        mode.names.clear()
        stack.enter_context(mode)

    def end(*_: Any) -> None:
        stack.close()
        last.clear()
        last.update(mode.names)

    hooks = [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        yield lambda: last
    finally:
        for hook in hooks:
            hook.remove()
