"""The transaction of a weight update: which update is live, where it stands, how long it waits.

Two modules own an update. This one owns the transaction: `CurrentUpdate` has room for one
`WeightUpdate`, which holds the state, the lease and the bytes (`incoming.py`).
`weight_updater.py` owns its effect: it has the engine load, and reports here how that ended.

Invariant: at most one update is live; a second one is refused with the first one's id and
remaining lease. An update is OPEN until every byte has arrived, then COMPLETE; COMMITTING while
the engine switches, then COMMITTED, or COMPLETE again if the engine refused. ABORTED and EXPIRED
are reachable until COMMITTING. An ended update stages nothing and accepts nothing.

How the last updates ended is remembered, so that a late call learns why its update is gone and a
repeated Begin or Commit of the last committed update is answered as the first one was.

Who waits: nobody. The lease runs only while the server waits for the trainer, not while the server
itself works on the update. A timer ends the update of a silent trainer and frees its memory; every
call checks the lease first, so no update outlives it.
"""

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from treadle.rollout_server.clock import Clock, TimerHandle
from treadle.rollout_server.errors import (
    InvalidField,
    UpdateIncomplete,
    UpdateInProgress,
    UpdateUnknown,
)
from treadle.rollout_server.updates.begin import Begin
from treadle.rollout_server.updates.incoming import IncomingTensors

_REMEMBERED = 16


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
    """One weight version on its way into one server. See the module docstring.

    Pure: every method that needs the time is given it. `CurrentUpdate` sets the timer.

    Args:
        begin: The announcement; its tensors match the engine's.

    Attributes:
        when_dropped: Called when the update ends without a commit.
    """

    def __init__(self, begin: Begin, incoming: IncomingTensors, *, now: float) -> None:
        self.begin = begin
        self.incoming = incoming
        self.when_dropped: Callable[[], None] | None = None
        self._lease_end = now + begin.lease_s
        self._working = 0
        self._committing = False
        self._ended: UpdateState | None = None

    @property
    def update_id(self) -> str:
        """The trainer's name for the update."""
        return self.begin.update_id

    @property
    def state(self) -> UpdateState:
        """Where the update stands."""
        if self._ended is not None:
            return self._ended
        if self._committing:
            return UpdateState.COMMITTING
        return UpdateState.COMPLETE if self.incoming.complete else UpdateState.OPEN

    @property
    def received(self) -> tuple[int, ...]:
        """Number of bytes received per tensor; all of them once committed.

        Raises:
            UpdateUnknown: The update ended without a commit.
        """
        if self._ended is not UpdateState.COMMITTED:
            return self.incoming.received
        if self.begin.delta is not None:
            return self.begin.delta.encoded_bytes
        return tuple(spec.size_bytes for spec in self.begin.tensors)

    def lease_left_s(self, now: float) -> float:
        """Returns the seconds until the update is dropped unless the trainer calls again."""
        stopped = self._working or self._committing
        return self.begin.lease_s if stopped else max(0.0, self._lease_end - now)

    def renew(self, now: float) -> None:
        """Restarts the lease: the trainer has called."""
        self._lease_end = now + self.begin.lease_s

    @contextmanager
    def working(self, clock: Clock) -> Iterator[None]:
        """Stops the lease while the server itself works on the update; restarts it afterwards."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            self.renew(clock.time())

    def begin_commit(self) -> None:
        """Moves from COMPLETE to COMMITTING.

        Raises:
            UpdateIncomplete: Bytes are missing.
            UpdateUnknown: The update ended.
        """
        assert not self._committing, "one commit at a time"
        missing = self.incoming.missing()
        if missing:
            raise UpdateIncomplete(missing)
        self._committing = True
        self.incoming.finish()

    def commit_failed(self) -> None:
        """Moves from COMMITTING back to COMPLETE: the engine kept its old weights."""
        assert self._committing
        self._committing = False

    def end(self, state: UpdateState) -> None:
        """Ends the update and, unless it was committed, frees its bytes."""
        assert self._ended is None, f"already {self._ended}"
        assert self._committing or state is not UpdateState.COMMITTED
        assert not (self._committing and state is UpdateState.ABORTED), "a commit runs to its end"
        self._ended = state
        self._committing = False
        dropped = state is not UpdateState.COMMITTED
        self.incoming.close(state.value, dropped=dropped)
        if dropped and self.when_dropped is not None:
            self.when_dropped()


class CurrentUpdate:
    """Room for one update at a time. See the module docstring.

    Args:
        max_chunk_bytes: Maximum length of a chunk.
    """

    def __init__(self, clock: Clock, *, max_chunk_bytes: int) -> None:
        self._max_chunk_bytes = max_chunk_bytes
        self._clock = clock
        self._live: WeightUpdate | None = None
        self._committed: WeightUpdate | None = None
        self._timer: TimerHandle | None = None
        self._ended: OrderedDict[str, tuple[UpdateState, int]] = OrderedDict()
        self._observers: list[Callable[[WeightUpdate], None]] = []

    def observe(self, observer: Callable[[WeightUpdate], None]) -> None:
        """Calls `observer` with every update that ends."""
        self._observers.append(observer)

    @property
    def live(self) -> WeightUpdate | None:
        """The live update."""
        if self._live is not None and self._live.lease_left_s(self._clock.time()) <= 0:
            self._end(UpdateState.EXPIRED)
        return self._live

    def begin(self, begin: Begin, *, split_tensors: bool = False) -> WeightUpdate:
        """Opens an update, or returns the one that `begin` repeats with its lease renewed.

        Args:
            split_tensors: Whether the engine takes parts of tensors in place.

        Raises:
            UpdateInProgress: Another update is live.
            InvalidField: The id was begun with another version, other tensors, or another way of
                transport.
        """
        now = self._clock.time()
        live = self.begun(begin) or self.live
        if live is None:
            # An id that is used again means the new update only.
            self._ended.pop(begin.update_id, None)
            incoming = IncomingTensors(
                begin, max_chunk_bytes=self._max_chunk_bytes, split_tensors=split_tensors
            )
            self._live = WeightUpdate(begin, incoming, now=now)
            self._watch()
            return self._live
        if live.update_id != begin.update_id:
            raise UpdateInProgress(live.update_id, live.lease_left_s(now))
        if not begin.repeats(live.begin):
            raise InvalidField(
                "update_id",
                repr(begin.update_id),
                "a new id: this one was begun with another version, other tensors or transport",
            )
        live.renew(now)
        return live

    def begun(self, begin: Begin) -> WeightUpdate | None:
        """Returns the update of this id and version if it is live or was committed last."""
        for update in (self.live, self._committed):
            if update is not None and update.update_id == begin.update_id:
                same = update.begin.weight_version == begin.weight_version
                return update if same else None
        return None

    def find(self, update_id: str) -> WeightUpdate:
        """Returns the live update of this id, its lease renewed.

        Raises:
            UpdateUnknown: It was never begun, or it ended.
        """
        live = self.live
        if live is None or live.update_id != update_id:
            state, _ = self._ended.get(update_id, (None, 0))
            raise UpdateUnknown(update_id, "was never begun" if state is None else state.value)
        live.renew(self._clock.time())
        return live

    def committed_version(self, update_id: str) -> int | None:
        """Returns the version that the update of this id brought, if it was committed."""
        state, version = self._ended.get(update_id, (None, 0))
        return version if state is UpdateState.COMMITTED else None

    def abort(self, update_id: str) -> None:
        """Drops the update of this id; does nothing if it was aborted before.

        Raises:
            UpdateUnknown: It was never begun, or it ended in another way.
        """
        if self._ended.get(update_id, (None, 0))[0] is UpdateState.ABORTED:
            return
        self.find(update_id)
        self._end(UpdateState.ABORTED)

    def committed(self) -> None:
        """Ends the live update: the engine serves its weights."""
        self._committed = self._live
        self._end(UpdateState.COMMITTED)

    def failed(self) -> None:
        """Ends the live update: the engine did not take its weights."""
        self._end(UpdateState.FAILED)

    def close(self) -> None:
        """Drops the live update, unless it is being committed."""
        live = self.live
        if live is not None and live.state is not UpdateState.COMMITTING:
            self.abort(live.update_id)

    def _end(self, state: UpdateState) -> None:
        update, self._live = self._live, None
        assert update is not None
        update.end(state)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._ended[update.update_id] = (state, update.begin.weight_version)
        self._ended.move_to_end(update.update_id)
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        for observer in self._observers:
            observer(update)

    def _watch(self) -> None:
        """Checks the lease when it would end; a renewed lease only postpones the next check."""
        update = self.live
        if update is not None:
            now = self._clock.time()
            self._timer = self._clock.call_at(now + update.lease_left_s(now), self._watch)
