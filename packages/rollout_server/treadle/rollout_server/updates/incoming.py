"""The bytes of one update, from a transport to the engine.

Staged, they are assembled in host memory and stay there until the commit. In place, each tensor
goes to the engine's queue as soon as it is whole, and its memory is freed when the engine has
written it. The tensors of which a part has arrived are held, at most one whole tensor per stream
(each stream waits for `room` before it reads on), and the one that the engine is writing. A sender
that sends tensor after tensor costs two of them. Where the engine can `split_tensors`, each chunk
is queued as it arrives, and two chunks are held.

Who waits: a stream, for the engine (`room`, `take_bucket`). `WeightUpdate` closes this when the
update ends, which wakes all of them.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from treadle.rollout_server.engine import CollectiveGroup, FilePlace, NamedTensor
from treadle.rollout_server.errors import InvalidField, UpdateUnknown
from treadle.rollout_server.updates.begin import Begin
from treadle.rollout_server.updates.buckets import BucketPart, MappedSegment
from treadle.rollout_server.updates.staging import Assembler
from treadle.rollout_server.updates.tensor_queue import TensorQueue

_SHORT_BYTES = 256 << 10  # copied sooner than a thread is woken


class IncomingTensors:
    """See the module docstring.

    Args:
        max_chunk_bytes: Maximum length of a chunk.
        split_tensors: Whether the engine takes parts of tensors in place.

    Attributes:
        split_tensors: Whether tensors go to the engine in parts.
        queue: Where the engine reads tensors from in place; None: they are staged.
    """

    def __init__(self, begin: Begin, *, max_chunk_bytes: int, split_tensors: bool = False) -> None:
        # The members of a collective group receive their tensors themselves.
        self._tensors = () if isinstance(begin.source, CollectiveGroup) else begin.tensors
        self._begin = begin
        self._assembler: Assembler | None = Assembler(
            self._tensors,
            max_chunk_bytes=max_chunk_bytes,
            releasable=begin.is_in_place,
            sizes=None if begin.delta is None else begin.delta.encoded_bytes,
        )
        self._ended = ""
        self._partial: dict[int, bytes] = {}  # tensor -> bytes of an element that is not whole
        self.split_tensors = begin.is_in_place and split_tensors
        self.queue = TensorQueue() if begin.is_in_place else None
        for index, spec in enumerate(self._tensors):
            if not spec.size_bytes:
                self._queue_whole(index)

    @property
    def assembler(self) -> Assembler:
        """The staged bytes.

        Raises:
            UpdateUnknown: The update ended; so does every method that takes bytes.
        """
        if self._assembler is None:
            raise UpdateUnknown(self._begin.update_id, self._ended)
        return self._assembler

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived."""
        return self.assembler.complete

    @property
    def received(self) -> tuple[int, ...]:
        """Number of bytes received per tensor."""
        return self.assembler.received

    def missing(self) -> tuple[int, ...]:
        """Returns the indices of the tensors that lack bytes."""
        return self.assembler.missing()

    def check_pushed(self) -> None:
        """Checks that the bytes are to be pushed.

        Raises:
            InvalidField: They come from files or a group, and would collide.
        """
        if self._begin.source is not None:
            expected = "an update whose bytes are pushed; this one reads files or a group"
            raise InvalidField("update_id", repr(self._begin.update_id), expected)

    def accept(self, tensor_index: int, offset: int, crc32: int, data: bytes | memoryview) -> None:
        """Takes one chunk, which may be kept; see `Assembler.accept`."""
        if self.split_tensors:
            self.assembler.verify(tensor_index, offset, crc32, data)
            self._queue_part(tensor_index, offset, memoryview(bytearray(data)))
        elif self.assembler.accept(tensor_index, offset, crc32, data):
            self._queue_whole(tensor_index)

    def filled(self, tensor_index: int) -> None:
        """Takes a tensor that was written to the assembler and checked there."""
        self.assembler.filled(tensor_index)
        if self._tensors[tensor_index].size_bytes:  # Else it was queued at the start.
            self._queue_whole(tensor_index)

    async def take_bucket(self, segment: MappedSegment, parts: Sequence[BucketPart]) -> None:
        """Takes the parts of a bucket; returns when nobody reads the segment any more.

        Raises:
            InvalidField: There is no such tensor, or a part is empty, goes past its end, or, in
                place without `split_tensors`, is not all of it.
            ChunkOutOfOrder: A part does not start at the first missing byte.
        """
        for part in parts:
            if self.queue is None:
                await self._copy(segment, part)
            else:
                view, place = segment.view(part), segment.place(part)
                self.lend(part.tensor_index, part.offset, view, place, owner=segment)
        if self.queue is not None:
            await self.queue.caught_up()

    def lend(
        self, tensor_index: int, offset: int, data: memoryview, place: FilePlace, *, owner: object
    ) -> None:
        """Queues bytes that lie in memory of the sender, in place only; see `take_bucket`.

        Args:
            offset: Offset of the data in it, which is the number of bytes received so far.
            place: Where the engine's workers find them.
            owner: Keeps `place` open; held until the engine has written the data.
        """
        self.assembler.check(tensor_index, offset, len(data))
        whole = self._tensors[tensor_index].size_bytes
        if not self.split_tensors and len(data) != whole:
            raise InvalidField(
                "length", len(data), f"{whole}: in place, this engine takes whole tensors"
            )
        self._queue_part(tensor_index, offset, data, place=place, owner=owner)

    async def room(self) -> None:
        """Waits, in place, until the engine has taken every whole tensor.

        Raises:
            UpdateUnknown: The update ended.
        """
        if self.queue is not None:
            await self.queue.room()

    def finish(self) -> None:
        """Tells the engine, in place, that every tensor is queued."""
        if self.queue is not None:
            self.queue.finish()

    def close(self, ended: str, *, dropped: bool) -> None:
        """Takes no more bytes.

        Args:
            ended: Completes "update 'x' ..." in the errors of later calls.
            dropped: Whether the bytes are freed, and the engine and all streams get an error.
        """
        self._ended = ended
        assembler, self._assembler = self._assembler, None
        if dropped and assembler is not None:
            assembler.clear()
        if dropped and self.queue is not None:
            self.queue.close(UpdateUnknown(self._begin.update_id, ended))

    async def _copy(self, segment: MappedSegment, part: BucketPart) -> None:
        assembler = self.assembler
        assembler.check(part.tensor_index, part.offset, part.length)
        write = partial(assembler.write, part.tensor_index, part.offset, segment.view(part))
        if part.length <= _SHORT_BYTES:
            write()
        else:
            await asyncio.to_thread(write)
            # Another stream may have brought the same bytes meanwhile; they count once.
            assembler.check(part.tensor_index, part.offset, part.length)
        assembler.advance(part.tensor_index, part.length)

    def _queue_whole(self, tensor_index: int) -> None:
        """Queues a whole tensor for the engine, in place."""
        if self.queue is not None:
            assembler = self.assembler
            release = partial(assembler.release, tensor_index)
            self.queue.put(assembler.named_tensor(tensor_index), done=release)

    def _queue_part(
        self,
        tensor_index: int,
        offset: int,
        data: memoryview,
        *,
        place: FilePlace | None = None,
        owner: object = None,
    ) -> None:
        """Queues the whole elements among the next bytes of a tensor."""
        assert self.queue is not None, "a staged update copies"
        spec = self._tensors[tensor_index]
        self.assembler.advance(tensor_index, len(data))
        if begun := self._partial.pop(tensor_index, b""):
            offset, data, place = offset - len(begun), memoryview(bytearray(begun + data)), None
        rest = len(data) % spec.element_type.size_bytes
        if rest:
            self._partial[tensor_index] = bytes(data[-rest:])
            data = data[:-rest]
        if data:
            part = NamedTensor(spec=spec, data=data, place=place, offset=offset)
            self.queue.put(part, owner=owner)
