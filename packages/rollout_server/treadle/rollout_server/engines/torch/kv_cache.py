"""The KV cache: one row per running sequence, in one growing buffer.

Invariant: the rows in use are the first ones, so a step reads them as a view without a copy.
The scheduler keeps them contiguous: it moves another row into the place of one that is freed.
Memory beyond the length of a row may be stale but is always finite: a masked position has
weight zero, and zero times infinity would be NaN.

Shapes: L layers, R rows, N positions, H key-value heads, D head size.
"""

from dataclasses import dataclass

import torch

_FIRST_ROWS, _FIRST_LENGTH = 8, 256
LENGTH_UNIT = 16
"""Unit of the length of the buffer, in positions: that of the vectors of a softmax."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheShape:
    """The size of one position, and the maximum size of the buffer.

    Attributes:
        is_exact: Whether the bits of a token's results do not depend on what else a step computes.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    max_rows: int
    max_length: int
    is_exact: bool = False

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one position: keys and values of all layers."""
        return 2 * self.num_layers * self.num_heads * self.head_dim * self.dtype.itemsize


class KvCache:
    """Rows of keys and values; memory grows as needed, up to the maximum."""

    shares_prefixes = True

    def __init__(self, shape: KvCacheShape) -> None:
        self.shape = shape
        self._buffer_L2RHND = self._allocate(0, 0)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of one layer, ``[R, H, N, D]`` each, views of the buffer."""
        keys, values = self._buffer_L2RHND[index].unbind(0)
        return keys, values

    @property
    def capacity(self) -> tuple[int, int]:
        """Number of rows and positions that are allocated."""
        return self._buffer_L2RHND.shape[2], self._buffer_L2RHND.shape[4]

    def reserve(self, rows: int, length: int) -> None:
        """Grows the buffer to at least this size; keeps its contents."""
        has_rows, has_length = self.capacity
        if rows <= has_rows and length <= has_length:
            return
        shape = self.shape
        want_rows = _grown(has_rows, rows, _FIRST_ROWS, shape.max_rows)
        most = shape.max_length + -shape.max_length % LENGTH_UNIT
        want_length = _grown(has_length, length, _FIRST_LENGTH, most)
        old, self._buffer_L2RHND = self._buffer_L2RHND, self._allocate(want_rows, want_length)
        self._buffer_L2RHND[:, :, :has_rows, :, :has_length] = old

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of one row over another."""
        rows = self._buffer_L2RHND
        rows[:, :, target, :, :length] = rows[:, :, source, :, :length]

    def snapshot(self, row: int, length: int) -> torch.Tensor:
        """Returns a copy of the first `length` positions, ``[L, 2, H, length, D]``."""
        return self._buffer_L2RHND[:, :, row, :, :length].clone()

    def restore(self, row: int, snapshot: torch.Tensor, length: int) -> None:
        """Writes the first `length` positions of a snapshot into a row."""
        self._buffer_L2RHND[:, :, row, :, :length] = snapshot[:, :, :, :length]

    def release(self) -> None:
        """Frees the memory; `reserve` allocates it again."""
        self._buffer_L2RHND = self._allocate(0, 0)

    def _allocate(self, rows: int, length: int) -> torch.Tensor:
        s = self.shape
        size = (s.num_layers, 2, rows, s.num_heads, length, s.head_dim)
        return torch.zeros(size, dtype=s.dtype, device=s.device)


def _grown(has: int, wants: int, first: int, bound: int) -> int:
    """Returns a size that fits `wants`, doubled from `first`, at most `bound`; never shrinks."""
    size = max(has, min(first, bound))
    while size < wants:
        size = min(size * 2, bound)
    return size
