"""The update session: one weight version on its way into one server.

Invariant: OPEN until every byte is there, then COMPLETE; COMMITTING while the engine
switches, then COMMITTED, or COMPLETE again when the engine refused. ABORTED and EXPIRED
can be reached until COMMITTING. In an ended session nothing is staged and nothing more
comes. The lease runs only while the server waits for its trainer, not while the server
itself works on the update.

Pure: every method that needs the time is given it. `slot.py` sets the timer.
"""

import enum
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from treadle.rollout_server.clock import Clock
from treadle.rollout_server.engine import NamedTensor, TensorSpec
from treadle.rollout_server.errors import UpdateIncomplete, UpdateUnknown
from treadle.rollout_server.updates.assemble import Assembler


class UpdateState(enum.Enum):
    """Where an update stands; the value completes "update 'x' ..." in messages."""

    OPEN = "lacks bytes"
    COMPLETE = "waits for its commit"
    COMMITTING = "is being committed"
    COMMITTED = "was committed"
    ABORTED = "was aborted"
    EXPIRED = "ran out of its lease"

    @property
    def ended(self) -> bool:
        """Whether nothing more can happen to the update."""
        return self in (UpdateState.COMMITTED, UpdateState.ABORTED, UpdateState.EXPIRED)


class UpdateSession:
    """See the module docstring.

    Args:
        update_id: The trainer's name for it.
        weight_version: What the weights become.
        tensors: What was announced, already compared with the engine's.
        lease_s: How long the server waits for its trainer.
        max_chunk_bytes: Longest chunk taken.
        now: When it begins.
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
    ) -> None:
        self.update_id = update_id
        self.weight_version = weight_version
        self.tensors = tuple(tensors)
        self._lease_s = lease_s
        self._lease_end = now + lease_s
        self._working = 0
        self._assembler: Assembler | None = Assembler(tensors, max_chunk_bytes=max_chunk_bytes)
        self._ended: UpdateState | None = None
        self._committing = False

    @property
    def state(self) -> UpdateState:
        """Where the update stands."""
        if self._ended is not None:
            return self._ended
        if self._committing:
            return UpdateState.COMMITTING
        return UpdateState.OPEN if self.assembler.missing() else UpdateState.COMPLETE

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

    def accept(
        self, tensor_index: int, offset: int, crc32: int, data: bytes | memoryview, *, now: float
    ) -> int:
        """Stages one chunk and renews the lease; see `Assembler.accept`.

        Raises:
            UpdateUnknown: The session ended.
        """
        held = self.assembler.accept(tensor_index, offset, crc32, data)
        self.renew(now)
        return held

    def begin_commit(self) -> Iterator[NamedTensor]:
        """From COMPLETE to COMMITTING; returns the tensors.

        Raises:
            UpdateIncomplete: Bytes are missing.
            UpdateUnknown: The session ended.
        """
        assert not self._committing, "one commit at a time"
        missing = self.assembler.missing()
        if missing:
            raise UpdateIncomplete(missing)
        self._committing = True
        return self.assembler.named_tensors()

    def commit_failed(self) -> None:
        """From COMMITTING back to COMPLETE: the engine kept its old weights."""
        assert self._committing
        self._committing = False

    def committed(self) -> None:
        """From COMMITTING to COMMITTED."""
        assert self._committing
        self._end(UpdateState.COMMITTED)

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
        self._assembler = None
