"""Staging: chunks in, whole tensors out, in host memory.

The `Assembler` checks what arrives; the `StagingArea` holds it, in a file without a name. Bytes are
copied once.

Invariant: of each tensor exactly the first `received[i]` bytes have arrived, every one of them
covered by a chunk whose CRC-32 matched; a chunk that is refused changes nothing. So any
interleaving of tensors, any duplicate and any broken stream leads to the same bytes, or to an
error that gives the position to resume from. Bytes that have arrived are held until released.

Tensor i lies at one place of one memfd for as long as the area lives, so other processes of this
host get its `FilePlace` and map it, instead of receiving the bytes. A page costs memory from the
first byte written to it until `release` or `clear`.

Nobody waits here; `write` may be called from any thread. The file goes with the area; a view of it
stays valid for as long as it is held.
"""

import mmap
import os
import weakref
import zlib
from collections.abc import Iterator, Sequence
from itertools import accumulate

from treadle.rollout_server.engine import FilePlace, NamedTensor, TensorSpec
from treadle.rollout_server.errors import ChunkCorrupt, ChunkOutOfOrder, InvalidField

_ALIGNMENT = 64  # of a cache line, and of every element type


class Assembler:
    """Host memory for one set of tensors.

    Args:
        tensors: Tensors that will arrive; a tensor of no bytes is complete from the start.
        max_chunk_bytes: Maximum length of a chunk.
        releasable: Whether tensors are released one by one.
        sizes: Number of bytes that arrive per tensor; None: all of it.
    """

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        *,
        max_chunk_bytes: int,
        releasable: bool = False,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.tensors = tuple(tensors)
        self.max_chunk_bytes = max_chunk_bytes
        whole = (spec.size_bytes for spec in self.tensors)
        self._size_bytes = list(whole if sizes is None else sizes)
        self._area = StagingArea(self._size_bytes, releasable=releasable)
        self._received = [0] * len(self.tensors)
        self._num_missing = sum(size > 0 for size in self._size_bytes)

    @property
    def received(self) -> tuple[int, ...]:
        """Number of bytes received per tensor."""
        return tuple(self._received)

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived."""
        return not self._num_missing

    def missing(self) -> tuple[int, ...]:
        """Returns the indices of the tensors that lack bytes."""
        sizes = self._size_bytes
        return tuple(i for i, held in enumerate(self._received) if held < sizes[i])

    def accept(self, tensor_index: int, offset: int, crc32: int, data: bytes | memoryview) -> bool:
        """Appends one chunk to its tensor.

        Args:
            offset: Offset of the chunk's first byte, which is the number of bytes received so far.
            crc32: CRC-32 of `data`, as zlib computes it.
            data: Holds at least one byte.

        Returns:
            Whether the tensor is whole now.

        Raises:
            InvalidField: There is no such tensor, or the chunk is empty, too long, or
                goes past the tensor's end.
            ChunkOutOfOrder: The chunk does not start at the first missing byte.
            ChunkCorrupt: The bytes do not match `crc32`.
        """
        self.verify(tensor_index, offset, crc32, data)
        self.write(tensor_index, offset, data)
        return self.advance(tensor_index, len(data))

    def verify(self, tensor_index: int, offset: int, crc32: int, data: bytes | memoryview) -> None:
        """Checks whether a chunk would be accepted; raises as `accept`."""
        length = len(data)
        if length > self.max_chunk_bytes:
            raise InvalidField(
                "chunk.data", f"{length} bytes", f"1 to {self.max_chunk_bytes} bytes"
            )
        self.check(tensor_index, offset, length)
        computed = zlib.crc32(data)
        if computed != crc32:
            raise ChunkCorrupt(tensor_index, offset, crc32, computed)

    def check(self, tensor_index: int, offset: int, length: int) -> None:
        """Checks that bytes are the next ones of a tensor, for a transport that writes them itself.

        Args:
            offset: Offset of the first byte, which is the number of bytes received so far.
            length: Holds at least one byte.

        Raises:
            InvalidField: There is no such tensor, or `length` is 0 or goes past its end.
            ChunkOutOfOrder: The bytes do not start at the first missing one.
        """
        if not 0 <= tensor_index < len(self.tensors):
            raise InvalidField("tensor_index", tensor_index, f"below {len(self.tensors)}")
        received = self._received[tensor_index]
        if offset != received:
            raise ChunkOutOfOrder(tensor_index, received, offset)
        left = self._size_bytes[tensor_index] - received
        if not 1 <= length <= left:
            raise InvalidField("data", f"{length} bytes", f"1 to the {left} bytes that are missing")

    def write(self, tensor_index: int, offset: int, data: bytes | memoryview) -> None:
        """Stages bytes that were checked. They count as received only after `advance`."""
        self._area.write(tensor_index, offset, data)

    def advance(self, tensor_index: int, length: int) -> bool:
        """Counts `length` more bytes, which were checked; returns whether the tensor is whole."""
        if length:  # Else a tensor of no bytes, which was whole from the start.
            self._received[tensor_index] += length
            self._num_missing -= self._is_whole(tensor_index)
        return self._is_whole(tensor_index)

    def filled(self, tensor_index: int) -> None:
        """Counts all bytes of a tensor of which none had arrived; they were checked."""
        self.advance(tensor_index, self._size_bytes[tensor_index])

    def release(self, tensor_index: int) -> None:
        """Frees the bytes of a tensor; they count as received."""
        self._area.release(tensor_index)

    def clear(self) -> None:
        """Frees all bytes, even where a view of them is still held, as by an error's frames."""
        self._area.clear()

    def view(self, tensor_index: int) -> memoryview:
        """Returns the bytes of a tensor that are held."""
        return self._area.view(tensor_index)

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Yields the tensors in the order in which they were announced; all must be complete."""
        assert self.complete, "tensors are read only when every byte is there"
        return map(self.named_tensor, range(len(self.tensors)))

    def named_tensor(self, tensor_index: int) -> NamedTensor:
        """Returns a tensor that is whole."""
        return NamedTensor(
            spec=self.tensors[tensor_index],
            data=self.view(tensor_index),
            place=self._area.place(tensor_index),
        )

    def _is_whole(self, tensor_index: int) -> bool:
        return self._received[tensor_index] == self._size_bytes[tensor_index]


class StagingArea:
    """Memory that other processes of this host can map. See the module docstring.

    Args:
        sizes: Number of bytes per tensor.
        releasable: Whether single tensors are released. Then no two tensors share a page.

    Raises:
        InvalidField: This host cannot map as many bytes.
    """

    def __init__(self, sizes: Sequence[int], *, releasable: bool = False) -> None:
        unit = mmap.PAGESIZE if releasable else _ALIGNMENT
        self._releasable = releasable
        self._sizes = tuple(sizes)
        self._starts = tuple(accumulate((_rounded(size, unit) for size in sizes), initial=0))
        num_bytes = max(1, self._starts[-1])
        descriptor = os.memfd_create("treadle-staging", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        self._path = f"/proc/{os.getpid()}/fd/{descriptor}"
        try:
            os.ftruncate(descriptor, num_bytes)
            self._map = mmap.mmap(descriptor, num_bytes)
        except (OSError, OverflowError) as error:
            expected = f"as much as this host can map: {error}"
            raise InvalidField("tensors", f"{num_bytes} bytes", expected) from None
        self._view = memoryview(self._map)

    def write(self, index: int, offset: int, data: bytes | memoryview) -> None:
        """Writes bytes into a tensor; from any thread."""
        # Through the file: the first write to each page of a mapping costs a fault, and all faults
        # together cost more than the copy.
        left, place = memoryview(data), self._starts[index] + offset
        while left:
            count = os.pwrite(self._descriptor, left, place)
            left, place = left[count:], place + count

    def view(self, index: int) -> memoryview:
        """Returns the bytes of a tensor, to be read."""
        start = self._starts[index]
        return self._view[start : start + self._sizes[index]]

    def place(self, index: int) -> FilePlace:
        """Returns where other processes find the bytes of a tensor."""
        return FilePlace(path=self._path, offset=self._starts[index])

    def release(self, index: int) -> None:
        """Frees the memory of a tensor; its bytes are zeros from now on."""
        assert self._releasable, "tensors share pages"
        start, stop = self._starts[index], self._starts[index + 1]
        if start < stop:
            self._map.madvise(mmap.MADV_REMOVE, start, stop - start)

    def clear(self) -> None:
        """Frees the memory of all tensors; their bytes are zeros from now on."""
        self._map.madvise(mmap.MADV_REMOVE)


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
