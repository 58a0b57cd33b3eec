"""The update slot: room for one update at a time.

Invariant: at most one session is live; a second update is refused with the first one's
name and remaining lease. How the last updates ended is remembered, so that a late call
learns why its update is gone; the one that was committed last is known to a Begin that comes again.

Who waits: nobody. A timer on the clock ends the session of a silent trainer and frees its
memory; every call looks at the lease first, so none outlives it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from treadle.rollout_server.clock import Clock, Timer
from treadle.rollout_server.engine import CollectiveGroup, TensorSpec
from treadle.rollout_server.errors import InvalidField, UpdateInProgress, UpdateUnknown
from treadle.rollout_server.updates.delta import Delta
from treadle.rollout_server.updates.files import WeightFiles
from treadle.rollout_server.updates.weight_update import UpdateState, WeightUpdate

_REMEMBERED = 16


class CurrentUpdate:
    """Holds the live session.

    Args:
        clock: Times the leases.
        max_chunk_bytes: Longest chunk taken.
    """

    def __init__(self, clock: Clock, *, max_chunk_bytes: int) -> None:
        self.max_chunk_bytes = max_chunk_bytes
        self._clock = clock
        self._live: WeightUpdate | None = None
        self._committed: WeightUpdate | None = None
        self._timer: Timer | None = None
        self._ended: OrderedDict[str, tuple[UpdateState, int]] = OrderedDict()
        self._observers: list[Callable[[WeightUpdate], None]] = []

    def observe(self, observer: Callable[[WeightUpdate], None]) -> None:
        """Calls `observer` with every session that ended."""
        self._observers.append(observer)

    @property
    def live(self) -> WeightUpdate | None:
        """The live session."""
        if self._live is not None:
            self._live.tick(self._clock.time())
            self._retire()
        return self._live

    def begin(
        self,
        update_id: str,
        weight_version: int,
        tensors: Sequence[TensorSpec],
        lease_s: float,
        *,
        in_place: bool = False,
        split_tensors: bool = False,
        source: CollectiveGroup | WeightFiles | None = None,
        delta: Delta | None = None,
        keep_base: bool = False,
    ) -> WeightUpdate:
        """Opens a session, or finds the one that was begun and renews its lease.

        Raises:
            UpdateInProgress: Another update is live.
            InvalidField: This id was begun for another version or other tensors, or they come
                or are kept otherwise.
        """
        now = self._clock.time()
        live = self.begun(update_id, weight_version) or self.live
        if live is None:
            # An id that is used anew means the new update only.
            self._ended.pop(update_id, None)
            self._live = WeightUpdate(
                update_id=update_id,
                weight_version=weight_version,
                tensors=tensors,
                lease_s=lease_s,
                max_chunk_bytes=self.max_chunk_bytes,
                now=now,
                in_place=in_place,
                split_tensors=split_tensors,
                source=source,
                delta=delta,
                keep_base=keep_base,
            )
            self._watch()
            return self._live
        if live.update_id != update_id:
            raise UpdateInProgress(live.update_id, live.lease_left_s(now))
        known = (live.weight_version, live.tensors, live.tensor_queue is not None)
        ways = (live.source, live.delta, live.keep_base)
        if (known, ways) != (
            (weight_version, tuple(tensors), in_place),
            (source, delta, keep_base),
        ):
            raise InvalidField(
                "update_id",
                repr(update_id),
                "a new id: its version, its tensors or how they come are others",
            )
        live.renew(now)
        return live

    def begun(self, update_id: str, weight_version: int) -> WeightUpdate | None:
        """The update that is live, or else the one that was committed last, if it is this one."""
        for update in (self.live, self._committed):
            if update is not None and update.update_id == update_id:
                return update if update.weight_version == weight_version else None
        return None

    def find(self, update_id: str) -> WeightUpdate:
        """The live session of this id, its lease renewed.

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
        """The version that an update of this id brought, if it was committed."""
        state, version = self._ended.get(update_id, (None, 0))
        return version if state is UpdateState.COMMITTED else None

    def abort(self, update_id: str) -> None:
        """Drops the session of this id.

        Raises:
            UpdateUnknown: It was never begun, or it ended otherwise than by abort.
        """
        if self._ended.get(update_id, (None, 0))[0] is UpdateState.ABORTED:
            return
        self.find(update_id).abort()
        self._retire()

    def committed(self) -> None:
        """Ends the live session, which the engine has taken."""
        assert self._live is not None
        self._live.committed()
        self._committed = self._live
        self._retire()

    def failed(self) -> None:
        """Ends the live session, which the engine has not taken."""
        assert self._live is not None
        self._live.failed()
        self._retire()

    def close(self) -> None:
        """Drops whatever is live, as at shutdown."""
        live = self.live
        if live is not None and live.state is not UpdateState.COMMITTING:
            self.abort(live.update_id)

    def _retire(self) -> None:
        """Lets go of a session that ended."""
        update = self._live
        if update is None or not update.state.ended:
            return
        self._live = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._ended[update.update_id] = (update.state, update.weight_version)
        self._ended.move_to_end(update.update_id)
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        for observer in self._observers:
            observer(update)

    def _watch(self) -> None:
        """Looks again when the lease would end; a renewed lease only moves that look."""
        update = self.live
        if update is None:
            return
        now = self._clock.time()
        self._timer = self._clock.call_at(now + update.lease_left_s(now), self._watch)
