"""The staging area: host memory for the tensors of one update, in a file without a name.

Invariant: tensor i lies at one place of one memfd for as long as the area lives, so other
processes of this host map what they are told the `FilePlace` of instead of being sent it. A
page costs memory from the first byte written to it until `release` or `clear`, if there is one.

Nothing waits. The file goes with the area; a view of it stays good for as long as it is held.
"""

import mmap
import os
import weakref
from collections.abc import Sequence
from itertools import accumulate

from treadle.rollout_server.engine import FilePlace

_ALIGNMENT = 64  # of a cache line, and of every element type


class StagingArea:
    """See the module docstring.

    Args:
        sizes: Bytes of each tensor.
        releasable: Whether single tensors are released. Then each has pages of its own.
    """

    def __init__(self, sizes: Sequence[int], *, releasable: bool = False) -> None:
        unit = mmap.PAGESIZE if releasable else _ALIGNMENT
        self._releasable = releasable
        self._sizes = tuple(sizes)
        self._starts = tuple(accumulate((_rounded(size, unit) for size in sizes), initial=0))
        num_bytes = max(1, self._starts[-1])
        descriptor = os.memfd_create("treadle-staging", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, num_bytes)
        self._descriptor = descriptor
        self._path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._map = mmap.mmap(descriptor, num_bytes)
        self._view = memoryview(self._map)

    def write(self, index: int, offset: int, data: bytes | memoryview) -> None:
        """Puts bytes into a tensor; from any thread.

        Through the file, because the first write to each page of a mapping costs a fault, and
        all of them together more than the copy.
        """
        left, place = memoryview(data), self._starts[index] + offset
        while left:
            count = os.pwrite(self._descriptor, left, place)
            left, place = left[count:], place + count

    def view(self, index: int) -> memoryview:
        """The bytes of a tensor, to be read."""
        start = self._starts[index]
        return self._view[start : start + self._sizes[index]]

    def place(self, index: int) -> FilePlace:
        """Where other processes find them."""
        return FilePlace(path=self._path, offset=self._starts[index])

    def release(self, index: int) -> None:
        """Gives the memory of a tensor back; its bytes are zeros from now on."""
        assert self._releasable, "tensors share pages"
        start, stop = self._starts[index], self._starts[index + 1]
        if start < stop:
            self._map.madvise(mmap.MADV_REMOVE, start, stop - start)

    def clear(self) -> None:
        """Gives the memory of all tensors back; their bytes are zeros from now on."""
        self._map.madvise(mmap.MADV_REMOVE)


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
