"""Functions of tensors that are one kernel on a GPU, where torch compiles them.

On a CPU they run as they are written: each operation is a kernel, and the result is the same bit
for bit whatever else was compiled. A compiled function rounds once at its end instead of after each
operation, so bfloat16 results on a GPU differ from a CPU's by rounding.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import torch

_log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])


def fused(function: F) -> F:
    """Returns the function, compiled once for all sizes where there is CUDA."""
    if not torch.cuda.is_available():
        return function
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))):
        _warn_of_compiler()
        return function
    from torch._dynamo import config  # takes a second, which only a GPU pays back

    # Each of these has some variants (masks, temperatures, one row), whose number is bounded.
    config.recompile_limit = max(config.recompile_limit, 64)
    compiled: Any = torch.compile(function, dynamic=True)
    return cast(F, compiled)


@cache
def _warn_of_compiler() -> None:
    _log.warning(
        "no C compiler is found, which Triton needs: log-probabilities are computed by single "
        "kernels, slower and with more memory. Install gcc, or set CC"
    )
