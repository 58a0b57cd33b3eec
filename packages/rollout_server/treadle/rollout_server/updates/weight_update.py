"""The update session: one weight version on its way into one server.

Invariant: OPEN until every byte is there, then COMPLETE; COMMITTING while the engine
switches, then COMMITTED, or COMPLETE again when the engine refused. ABORTED and EXPIRED
can be reached until COMMITTING. In an ended session nothing is staged and nothing more
comes. The lease runs only while the server waits for its trainer, not while the server
itself works on the update.

A session in place hands every tensor over as it becomes whole and lets its bytes go when the
engine has them. It holds the tensors of which a part has come, at most one whole tensor per
stream (each asks for `room` before it reads on), and the one that the engine is at. A sender
that sends tensor after tensor costs two of them. Where the engine can `split_tensors`, each chunk
is handed over as it comes, and two chunks are what is held.

Pure: every method that needs the time is given it. `current_update.py` sets the timer.
"""

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from treadle.rollout_server.clock import Clock
from treadle.rollout_server.engine import CollectiveGroup, FilePlace, NamedTensor, TensorSpec
from treadle.rollout_server.errors import (
    InvalidField,
    UpdateIncomplete,
    UpdateUnknown,
)
from treadle.rollout_server.updates.assemble import Assembler
from treadle.rollout_server.updates.delta import Delta
from treadle.rollout_server.updates.files import WeightFiles
from treadle.rollout_server.updates.tensor_queue import TensorQueue


class UpdateState(enum.Enum):
    """Where an update stands; the value completes "update 'x' ..." in messages."""

    OPEN = "lacks bytes"
    COMPLETE = "waits for its commit"
    COMMITTING = "is being committed"
    COMMITTED = "was committed"
    ABORTED = "was aborted"
    EXPIRED = "ran out of its lease"
    FAILED = "was not taken by the engine"

    @property
    def ended(self) -> bool:
        """Whether nothing more can happen to the update."""
        return self in _ENDED


_ENDED = frozenset(
    {UpdateState.COMMITTED, UpdateState.ABORTED, UpdateState.EXPIRED, UpdateState.FAILED}
)


class WeightUpdate:
    """See the module docstring.

    Args:
        update_id: The trainer's name for it.
        weight_version: What the weights become.
        tensors: What was announced, already compared with the engine's.
        lease_s: How long the server waits for its trainer.
        max_chunk_bytes: Longest chunk taken.
        now: When it begins.
        in_place: Whether tensors go to the engine one by one.
        split_tensors: Whether it takes them in parts, in place.
        source: What they come from: files, or a group in which the engine's workers receive them
            themselves; None: they are pushed.
        delta: How the bytes that come are encoded; None: they are the tensors.
        keep_base: Whether the weights stay here as the base of a delta.

    Attributes:
        tensor_queue: Where the engine gets them from then.
        when_dropped: Called when the session ends otherwise than by a commit.
    """

    def __init__(
        self,
        *,
        update_id: str,
        weight_version: int,
        tensors: Sequence[TensorSpec],
        lease_s: float,
        max_chunk_bytes: int,
        now: float,
        in_place: bool = False,
        split_tensors: bool = False,
        source: CollectiveGroup | WeightFiles | None = None,
        delta: Delta | None = None,
        keep_base: bool = False,
    ) -> None:
        self.update_id = update_id
        self.weight_version = weight_version
        self.tensors = tuple(tensors)
        self._lease_s = lease_s
        self._lease_end = now + lease_s
        self._working = 0
        comes = () if isinstance(source, CollectiveGroup) else self.tensors
        self._assembler: Assembler | None = Assembler(
            comes,
            max_chunk_bytes=max_chunk_bytes,
            releasable=in_place,
            sizes=None if delta is None else delta.encoded_bytes,
        )
        self.source = source
        self.delta = delta
        self.keep_base = keep_base
        self.tensor_queue = TensorQueue() if in_place else None
        self.split_tensors = in_place and split_tensors
        self._begun: dict[int, bytes] = {}  # tensor -> bytes of an element that has not come whole
        self.when_dropped: Callable[[], None] | None = None
        for index, spec in enumerate(comes):
            if not spec.size_bytes:
                self._pass_on(index)
        self._ended: UpdateState | None = None
        self._committing = False

    @property
    def state(self) -> UpdateState:
        """Where the update stands."""
        if self._ended is not None:
            return self._ended
        if self._committing:
            return UpdateState.COMMITTING
        return UpdateState.COMPLETE if self.assembler.complete else UpdateState.OPEN

    @property
    def assembler(self) -> Assembler:
        """The staged bytes.

        Raises:
            UpdateUnknown: The session ended.
        """
        if self._assembler is None:
            assert self._ended is not None
            raise UpdateUnknown(self.update_id, self._ended.value)
        return self._assembler

    @property
    def received(self) -> tuple[int, ...]:
        """Bytes held of each tensor; of a committed update all.

        Raises:
            UpdateUnknown: The session ended otherwise.
        """
        if self._ended is not UpdateState.COMMITTED:
            return self.assembler.received
        if self.delta is not None:
            return self.delta.encoded_bytes
        return tuple(spec.size_bytes for spec in self.tensors)

    def lease_left_s(self, now: float) -> float:
        """Seconds until the update is dropped for want of news."""
        stopped = self._working or self._committing
        return self._lease_s if stopped else max(0.0, self._lease_end - now)

    def renew(self, now: float) -> None:
        """Starts the lease anew: the trainer gave news."""
        self._lease_end = now + self._lease_s

    @contextmanager
    def working(self, clock: Clock) -> Iterator[None]:
        """Stops the lease while the server itself works on the update."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            self.renew(clock.time())

    def check_pushed(self) -> None:
        """Whether bytes may be pushed.

        Raises:
            InvalidField: They come otherwise, and would meet those.
        """
        if self.source is not None:
            expected = "an update whose bytes are pushed; this one's come otherwise"
            raise InvalidField("update_id", repr(self.update_id), expected)

    def accept(
        self, tensor_index: int, offset: int, crc32: int, data: bytes | memoryview, *, now: float
    ) -> None:
        """Takes one chunk, which may be held, and renews the lease; see `Assembler.accept`.

        Raises:
            UpdateUnknown: The session ended.
        """
        if self.split_tensors:
            self.assembler.verify(tensor_index, offset, crc32, data)
            writable = memoryview(bytearray(data))
            self._pass_part(tensor_index, offset, writable, place=None, done=_nothing)
        elif self.assembler.accept(tensor_index, offset, crc32, data):
            self._pass_on(tensor_index)
        self.renew(now)

    def filled(self, tensor_index: int) -> None:
        """Takes a tensor that a transport has put into `Assembler.write` and checked.

        Raises:
            UpdateUnknown: The session ended.
        """
        self.assembler.filled(tensor_index)
        if self.tensors[tensor_index].size_bytes:  # Else it was passed on at the start.
            self._pass_on(tensor_index)

    def lend(
        self,
        tensor_index: int,
        offset: int,
        data: memoryview,
        place: FilePlace,
        *,
        done: Callable[[], None],
        now: float,
    ) -> None:
        """Takes bytes that lie in memory of the sender, in place only.

        Args:
            tensor_index: Which tensor.
            offset: Of the data in it: what has come of it so far.
            data: Not copied; all of the tensor, unless `split_tensors`.
            place: Where they are found by the engine's workers.
            done: Called when the sender may write over them.
            now: Renews the lease.

        Raises:
            UpdateUnknown: The session ended.
            InvalidField: There is no such tensor, or `data` is none, past its end, or not all
                of it.
            ChunkOutOfOrder: `data` does not start at the first missing byte.
        """
        assert self.tensor_queue is not None, "a staged update copies"
        assembler = self.assembler
        assembler.check(tensor_index, offset, len(data))
        whole = self.tensors[tensor_index].size_bytes
        if not self.split_tensors and len(data) != whole:
            raise InvalidField(
                "length", len(data), f"{whole}: in place, this engine takes whole tensors"
            )
        self._pass_part(tensor_index, offset, data, place=place, done=done)
        self.renew(now)

    async def room(self) -> None:
        """Waits, in place, until the engine has taken every whole tensor.

        Raises:
            UpdateUnknown: The session ended.
        """
        if self.tensor_queue is not None:
            await self.tensor_queue.room()

    def begin_commit(self) -> None:
        """From COMPLETE to COMMITTING.

        Raises:
            UpdateIncomplete: Bytes are missing.
            UpdateUnknown: The session ended.
        """
        assert not self._committing, "one commit at a time"
        missing = self.assembler.missing()
        if missing:
            raise UpdateIncomplete(missing)
        self._committing = True
        if self.tensor_queue is not None:
            self.tensor_queue.finish()

    def commit_failed(self) -> None:
        """From COMMITTING back to COMPLETE: the engine kept its old weights."""
        assert self._committing
        self._committing = False

    def committed(self) -> None:
        """From COMMITTING to COMMITTED."""
        assert self._committing
        self._end(UpdateState.COMMITTED)

    def failed(self) -> None:
        """The engine did not take the tensors of a session in place."""
        self._end(UpdateState.FAILED)

    def abort(self) -> None:
        """Drops everything."""
        assert not self._committing, "a commit runs to its end"
        self._end(UpdateState.ABORTED)

    def tick(self, now: float) -> bool:
        """Ends the session when its lease ran out; returns whether it did just now."""
        if self._ended is not None or self.lease_left_s(now) > 0:
            return False
        self._end(UpdateState.EXPIRED)
        return True

    def _end(self, state: UpdateState) -> None:
        assert self._ended is None, f"already {self._ended}"
        self._ended = state
        self._committing = False
        assembler, self._assembler = self._assembler, None
        if state is UpdateState.COMMITTED:
            return
        if assembler is not None:
            assembler.clear()
        if self.tensor_queue is not None:
            self.tensor_queue.close(UpdateUnknown(self.update_id, state.value))
        if self.when_dropped is not None:
            self.when_dropped()

    def _pass_on(self, tensor_index: int) -> None:
        """Hands a whole tensor to the engine, in place."""
        if self.tensor_queue is not None:
            assembler = self.assembler
            done = partial(assembler.release, tensor_index)
            self.tensor_queue.put(assembler.named_tensor(tensor_index), done)

    def _pass_part(
        self,
        tensor_index: int,
        offset: int,
        data: memoryview,
        *,
        place: FilePlace | None,
        done: Callable[[], None],
    ) -> None:
        """Hands the whole elements among the next bytes of a tensor to the engine."""
        assert self.tensor_queue is not None
        spec = self.tensors[tensor_index]
        self.assembler.advance(tensor_index, len(data))
        if begun := self._begun.pop(tensor_index, b""):
            offset, data, place = offset - len(begun), memoryview(bytearray(begun + data)), None
        rest = len(data) % spec.element_type.size_bytes
        if rest:
            self._begun[tensor_index] = bytes(data[-rest:])
            data = data[:-rest]
        if data:
            part = NamedTensor(spec=spec, data=data, place=place, offset=offset)
            self.tensor_queue.put(part, done)


def _nothing() -> None:
    """Says nothing: the bytes go with who holds them."""
