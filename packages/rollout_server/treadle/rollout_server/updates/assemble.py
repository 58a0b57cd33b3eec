"""The assembler: chunks in, whole tensors out.

Invariant: of each tensor exactly the first `received[i]` bytes are held, every one of them
covered by a chunk whose CRC-32 was right; a chunk that is refused changes nothing. So any
interleaving of tensors, any duplication and any broken stream leads to the same bytes or
to an error that says where to resume.

Bytes are copied once, into a buffer that is allocated when its tensor's first byte comes.
Pure; time and leases are the session's business.
"""

import mmap
import zlib
from collections.abc import Iterator, Sequence

from treadle.rollout_server.engine import NamedTensor, TensorSpec
from treadle.rollout_server.errors import ChunkCorrupt, ChunkOutOfOrder, InvalidField

_MAPPED_BYTES = 1 << 20  # Smaller tensors share pages.


class Assembler:
    """Host memory for one set of tensors.

    Args:
        tensors: What will come; a tensor of no bytes is complete from the start.
        max_chunk_bytes: Longest chunk taken.
    """

    def __init__(self, tensors: Sequence[TensorSpec], *, max_chunk_bytes: int) -> None:
        self.tensors = tuple(tensors)
        self.max_chunk_bytes = max_chunk_bytes
        self._size_bytes = [spec.size_bytes for spec in self.tensors]
        self._received = [0] * len(self.tensors)
        self._buffers: list[memoryview | None] = [None] * len(self.tensors)

    @property
    def received(self) -> tuple[int, ...]:
        """Bytes held of each tensor."""
        return tuple(self._received)

    def accept(self, tensor_index: int, offset: int, crc32: int, data: bytes | memoryview) -> int:
        """Appends one chunk to its tensor.

        Args:
            tensor_index: Which tensor.
            offset: Of the chunk's first byte; what is held of the tensor so far.
            crc32: zlib's CRC-32 of `data`.
            data: At least one byte.

        Returns:
            Bytes held of the tensor now.

        Raises:
            InvalidField: There is no such tensor, or the chunk is empty, too long, or
                goes past the tensor's end.
            ChunkOutOfOrder: The chunk does not start at the first missing byte.
            ChunkCorrupt: The bytes do not match `crc32`.
        """
        if not 0 <= tensor_index < len(self.tensors):
            raise InvalidField("chunk.tensor_index", tensor_index, f"below {len(self.tensors)}")
        length = len(data)
        if not 1 <= length <= self.max_chunk_bytes:
            raise InvalidField(
                "chunk.data", f"{length} bytes", f"1 to {self.max_chunk_bytes} bytes"
            )
        held = self._received[tensor_index]
        if offset != held:
            raise ChunkOutOfOrder(tensor_index, held, offset)
        if held + length > self._size_bytes[tensor_index]:
            left = self._size_bytes[tensor_index] - held
            raise InvalidField(
                "chunk.data", f"{length} bytes", f"at most the {left} bytes that are missing"
            )
        computed = zlib.crc32(data)
        if computed != crc32:
            raise ChunkCorrupt(tensor_index, offset, crc32, computed)
        self.buffer(tensor_index)[held : held + length] = data
        self._received[tensor_index] = held + length
        return held + length

    def buffer(self, tensor_index: int) -> memoryview:
        """The whole buffer of a tensor, for a transport that fills it in place."""
        view = self._buffers[tensor_index]
        if view is None:
            view = _reserve(self._size_bytes[tensor_index])
            self._buffers[tensor_index] = view
        return view

    def filled(self, tensor_index: int) -> None:
        """Says that `buffer(tensor_index)` holds the tensor, already checked."""
        self._received[tensor_index] = self._size_bytes[tensor_index]

    def missing(self) -> tuple[int, ...]:
        """Indices of the tensors that lack bytes."""
        sizes = self._size_bytes
        return tuple(i for i, held in enumerate(self._received) if held < sizes[i])

    def named_tensors(self) -> Iterator[NamedTensor]:
        """The tensors in the order in which they were announced; all must be complete."""
        assert not self.missing(), "tensors are read only when every byte is there"
        for index, spec in enumerate(self.tensors):
            yield NamedTensor(spec=spec, data=self.buffer(index))


def _reserve(size_bytes: int) -> memoryview:
    """Memory, of which a large tensor's pages come as they are written.

    A bytearray would be cleared at once, which for a gigabyte stops the event loop for half
    a second.
    """
    if size_bytes < _MAPPED_BYTES:
        return memoryview(bytearray(size_bytes))
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
