"""Functions of tensors that are one kernel on a GPU, where torch compiles them.

On a CPU they run as they are written: each operation is a kernel, and the result is the same bit
for bit whatever else was compiled. A compiled function rounds once at its end instead of after each
operation, so bfloat16 results on a GPU differ from a CPU's by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def fused(function: F) -> F:
    """Returns the function, compiled once for all sizes where there is CUDA."""
    if not torch.cuda.is_available():
        return function
    compiled: Any = torch.compile(function, dynamic=True)
    return cast(F, compiled)
