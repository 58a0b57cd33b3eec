"""The assembler: chunks in, whole tensors out.

Invariant: of each tensor exactly the first `received[i]` bytes have come, every one of them
covered by a chunk whose CRC-32 was right; a chunk that is refused changes nothing. So any
interleaving of tensors, any duplication and any broken stream leads to the same bytes or
to an error that says where to resume. What has come is held until it is released.

Bytes are copied once, into the staging area. Pure; time and leases are the session's business.
"""

import zlib
from collections.abc import Iterator, Sequence

from treadle.rollout_server.engine import NamedTensor, TensorSpec
from treadle.rollout_server.errors import ChunkCorrupt, ChunkOutOfOrder, InvalidField
from treadle.rollout_server.updates.staging import StagingArea


class Assembler:
    """Host memory for one set of tensors.

    Args:
        tensors: What will come; a tensor of no bytes is complete from the start.
        max_chunk_bytes: Longest chunk taken.
        releasable: Whether tensors are released one by one.
        sizes: Bytes that come of each tensor; None: all of it.
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
        """Bytes that have come of each tensor."""
        return tuple(self._received)

    @property
    def complete(self) -> bool:
        """Whether every byte has come."""
        return not self._num_missing

    def accept(self, tensor_index: int, offset: int, crc32: int, data: bytes | memoryview) -> bool:
        """Appends one chunk to its tensor.

        Args:
            tensor_index: Which tensor.
            offset: Of the chunk's first byte; what has come of the tensor so far.
            crc32: zlib's CRC-32 of `data`.
            data: At least one byte.

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
        """Whether a chunk would be accepted; raises as `accept`."""
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
        """Whether bytes are the next ones of a tensor, for a transport that writes them itself.

        Args:
            tensor_index: Which tensor.
            offset: Of the first byte; what has come of the tensor so far.
            length: At least one byte.

        Raises:
            InvalidField: There is no such tensor, or the bytes are none or go past its end.
            ChunkOutOfOrder: They do not start at the first missing byte.
        """
        if not 0 <= tensor_index < len(self.tensors):
            raise InvalidField("tensor_index", tensor_index, f"below {len(self.tensors)}")
        come = self._received[tensor_index]
        if offset != come:
            raise ChunkOutOfOrder(tensor_index, come, offset)
        left = self._size_bytes[tensor_index] - come
        if not 1 <= length <= left:
            raise InvalidField("data", f"{length} bytes", f"1 to the {left} bytes that are missing")

    def write(self, tensor_index: int, offset: int, data: bytes | memoryview) -> None:
        """Stages bytes that were checked; from any thread. `advance` says that they are there."""
        self._area.write(tensor_index, offset, data)

    def advance(self, tensor_index: int, length: int) -> bool:
        """Says that so many more bytes have come and were checked; whether it is whole now."""
        if length:  # Else a tensor of no bytes, which was whole from the start.
            self._received[tensor_index] += length
            self._num_missing -= self._is_whole(tensor_index)
        return self._is_whole(tensor_index)

    def filled(self, tensor_index: int) -> None:
        """Says that a tensor of which nothing had come is whole and was checked."""
        self.advance(tensor_index, self._size_bytes[tensor_index])

    def release(self, tensor_index: int) -> None:
        """Lets the bytes of a tensor go; they count as received."""
        self._area.release(tensor_index)

    def clear(self) -> None:
        """Lets all bytes go, whoever still holds a view of them, as an error's frames do."""
        self._area.clear()

    def view(self, tensor_index: int) -> memoryview:
        """The bytes of a tensor that are held."""
        return self._area.view(tensor_index)

    def missing(self) -> tuple[int, ...]:
        """Indices of the tensors that lack bytes."""
        sizes = self._size_bytes
        return tuple(i for i, held in enumerate(self._received) if held < sizes[i])

    def _is_whole(self, tensor_index: int) -> bool:
        return self._received[tensor_index] == self._size_bytes[tensor_index]

    def named_tensors(self) -> Iterator[NamedTensor]:
        """The tensors in the order in which they were announced; all must be complete."""
        assert self.complete, "tensors are read only when every byte is there"
        return map(self.named_tensor, range(len(self.tensors)))

    def named_tensor(self, tensor_index: int) -> NamedTensor:
        """A tensor that is whole."""
        return NamedTensor(
            spec=self.tensors[tensor_index],
            data=self.view(tensor_index),
            place=self._area.place(tensor_index),
        )
