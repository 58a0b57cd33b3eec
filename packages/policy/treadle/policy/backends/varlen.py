"""Attention over packed sequences in one kernel, on a GPU.

torch's kernel takes bfloat16 and float16, heads of up to 256 numbers, windows, and fewer key than
query heads. Where it cannot be used (a CPU, float32, capped scores) sequences are padded instead.

Shape suffixes: P packed rows, N sequences, A heads, K key-value heads, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from treadle.policy.backends.ranks import to_device

_TYPES: Final = (torch.bfloat16, torch.float16)
_MAX_HEAD: Final = 256


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where packed sequences begin and end.

    Attributes:
        offsets_N: [N + 1] rows before each sequence, and of all; int32, on the device.
        longest: Rows of the longest sequence.
        rows: Rows of all; rows after them are padding.
    """

    offsets_N: Tensor
    longest: int
    rows: int

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], at: torch.device) -> Bounds:
        """Returns those of sequences that lie end to end."""
        offsets = np.array([0, *accumulate(lengths)], dtype=np.int32)
        return cls(to_device(offsets, at), max(lengths), int(offsets[-1]))


def can_attend(query_PAD: Tensor, value_PKD: Tensor) -> bool:
    """Returns whether `attend` takes these, where scores are neither capped nor masked.

    Latent attention has values of another size. The kernel needs compute capability 8.0.
    """
    if _KERNEL is None or query_PAD.device.type != "cuda" or query_PAD.dtype not in _TYPES:
        return False
    size = query_PAD.shape[-1]
    fits = size <= _MAX_HEAD and size % 8 == 0 and size == value_PKD.shape[-1]
    return fits and torch.cuda.get_device_capability(query_PAD.device)[0] >= 8


def attend(
    query_PAD: Tensor,
    key_PKD: Tensor,
    value_PKD: Tensor,
    bounds: Bounds,
    *,
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    """Returns [P, A, D]: each row attends to the rows of its sequence up to itself.

    There is no padding: P is `bounds.rows`.

    Args:
        window: Rows that a row sees, itself included; None: all before it.
    """
    assert _KERNEL is not None
    options: dict[str, Any] = {}
    if query_PAD.shape[1] != key_PKD.shape[1]:
        if _TAKES_GROUPS:
            options["enable_gqa"] = True
        else:  # torch 2.11
            repeats = query_PAD.shape[1] // key_PKD.shape[1]
            key_PKD, value_PKD = (x.repeat_interleave(repeats, 1) for x in (key_PKD, value_PKD))
    offsets, longest = bounds.offsets_N, bounds.longest
    out: Tensor = _KERNEL(
        query_PAD,
        key_PKD,
        value_PKD,
        offsets,
        offsets,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    return out


def _find() -> tuple[Callable[..., Any] | None, bool]:
    """Returns torch's kernel, None before 2.11, and whether it takes grouped heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, False
    taken = inspect.signature(varlen_attn).parameters
    return (varlen_attn if "window_size" in taken else None), "enable_gqa" in taken


_KERNEL, _TAKES_GROUPS = _find()
