"""The session queue: gets a session's replica from the policy, and waits when there is no room.

Invariants:

1. A session for which the policy has no room waits here. When a session has finished or a replica
   was added, came back or was removed, the policy chooses again, for the oldest session first.
2. A waiter that gives up (deadline, cancellation) does not delay those behind it.
3. If no session got a slot for `stall_s` and some wait, the first of them proceeds without room:
   sessions that hold slots may wait for it, as a conversation waits for its sub-agent's.
4. Sessions that are idle for longer than the lease, `lease_s`, are dropped.

The caller waits in `open`, woken by `finish`, `add` and `remove`, bounded by `wait_s`. One event
loop owns the queue. It is used in a worker's own process and in the routing service alike.
"""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from treadle.agent_loop.clock import Clock
from treadle.agent_loop.routing.placement import Router
from treadle.agent_loop.routing.session_table import NoReplica
from treadle.agent_loop.rpc.router.occupancy import Occupancy
from treadle.tracing import span

_log = logging.getLogger(__name__)


class Placement(Protocol):
    """Assigns sessions to replicas: `SessionQueue` in this process, or the routing service."""

    async def open(
        self,
        session_id: str,
        *,
        context_tokens: int,
        avoid: Collection[str],
        wait_s: float,
    ) -> str | None:
        """Returns the address for a session's next request, or None if no replica accepts it.

        Args:
            session_id: The session; opened if it is new.
            context_tokens: Length of the request's prompt.
            avoid: Replicas that must not be chosen.
            wait_s: Maximum time to wait for room.

        Raises:
            TimeoutError: No replica had room in time.
            GenerationError: The router does not answer, or refuses.
        """
        ...

    def finish(self, session_id: str) -> None:
        """Frees the session's slot. Idempotent, never raises, never waits."""
        ...


@dataclass(slots=True, eq=False)
class _Waiter:
    context_tokens: int
    avoid: Collection[str]
    answer: asyncio.Future[str | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class SessionQueue:
    """A routing policy with a queue for sessions that find no room.

    Args:
        router: The policy; the queue becomes its owner.
        lease_s: See the invariants; None means that sessions stay open until they are finished.

    Attributes:
        occupancy: For how long each replica has had open sessions.
    """

    def __init__(
        self,
        router: Router,
        *,
        clock: Clock,
        lease_s: float | None = None,
        stall_s: float = 30.0,
    ) -> None:
        self.router = router
        self._clock = clock
        self._lease_s = lease_s
        self._stall_s = stall_s
        self._last_place_at = -math.inf
        self.occupancy = Occupancy(clock)
        self._renewed: OrderedDict[str, float] = OrderedDict()
        self._waiters: dict[str, list[_Waiter]] = {}

    async def open(
        self,
        session_id: str,
        *,
        context_tokens: int,
        avoid: Collection[str] = (),
        wait_s: float,
        at: str | None = None,
    ) -> str | None:
        """See `Placement.open`.

        Args:
            at: The replica that a session new to this queue used until now; None if none.
        """
        place = self._place(session_id, context_tokens=context_tokens, at=at, avoid=avoid)
        if place is NoReplica.UNAVAILABLE:
            return None
        if isinstance(place, str):
            return place
        return await self._wait(session_id, _Waiter(context_tokens, frozenset(avoid)), wait_s)

    def open_now(
        self,
        session_id: str,
        *,
        context_tokens: int,
        avoid: Collection[str] = (),
        at: str | None = None,
    ) -> str | None:
        """Returns what `open` would, or None where it would wait; the session keeps its turn."""
        place = self._place(session_id, context_tokens=context_tokens, at=at, avoid=avoid)
        if place is NoReplica.FULL and session_id not in self._waiters:
            self.router.stop_waiting(session_id)
            self._serve_waiters()
        return place if isinstance(place, str) else None

    def finish(self, session_id: str) -> None:
        """See `Placement.finish`."""
        self.close(session_id)

    def close(self, session_id: str) -> bool:
        """Finishes a session; returns False if it was not open."""
        self._renewed.pop(session_id, None)
        left = self.router.pinned(session_id)
        known = self.router.finish(session_id)
        self._note_load(left)
        self._serve_waiters()
        return known

    def add(self, address: str) -> None:
        """See `Router.add`."""
        self.router.add(address)
        self._serve_waiters()

    def drain(self, address: str) -> int:
        """See `Router.drain`."""
        open_sessions = self.router.drain(address)
        self._serve_waiters()
        return open_sessions

    def remove(self, address: str) -> None:
        """See `Router.remove`."""
        self.router.remove(address)
        self.occupancy.sessions_changed(address, sessions=0)
        self._serve_waiters()

    def _place(
        self, session_id: str, *, context_tokens: int, avoid: Collection[str], at: str | None
    ) -> str | NoReplica:
        """Opens the session, or notes that it is in use, and places it if there is room."""
        self._expire()
        place = self._pick(session_id, context_tokens=context_tokens, at=at, avoid=frozenset(avoid))
        if place is not NoReplica.UNAVAILABLE:
            self._renew(session_id)
        if isinstance(place, str):
            self._last_place_at = self._clock.now()
            self._serve_waiters()  # a move, or a session that lost its slot, made room
        return place

    def _pick(
        self,
        session_id: str,
        *,
        context_tokens: int,
        avoid: Collection[str],
        at: str | None = None,
        ignore_capacity: bool = False,
    ) -> str | NoReplica:
        """Lets the policy choose, and records which replicas have sessions now."""
        left = self.router.pinned(session_id)
        place = self.router.pick(
            session_id,
            context_tokens=context_tokens,
            at=at,
            avoid=avoid,
            ignore_capacity=ignore_capacity,
        )
        if place != left:
            self._note_load(left)
            self._note_load(place if isinstance(place, str) else None)
        return place

    def _note_load(self, address: str | None) -> None:
        if address is not None:
            self.occupancy.sessions_changed(address, sessions=self.router.load(address))

    async def _wait(self, session_id: str, waiter: _Waiter, wait_s: float) -> str | None:
        self._waiters.setdefault(session_id, []).append(waiter)
        try:
            async with span("route", session_id=session_id), asyncio.timeout(wait_s):
                while not waiter.answer.done():
                    self._break_stall()
                    await asyncio.wait([waiter.answer], timeout=self._stall_s)
                return waiter.answer.result()
        finally:
            others = self._waiters[session_id]
            others.remove(waiter)
            if not others:
                del self._waiters[session_id]
                self.router.stop_waiting(session_id)
                self._serve_waiters()

    def _serve_waiters(self) -> None:
        """Gives slots to waiting sessions, oldest first, until the next one finds no room."""
        while (session_id := self.router.oldest_waiting) is not None:
            if not self._serve(session_id):
                return

    def _serve(self, session_id: str, *, ignore_capacity: bool = False) -> bool:
        """Answers the waiters of one session; returns False if there is no room for it."""
        for waiter in self._waiters[session_id]:
            place = self._pick(
                session_id,
                context_tokens=waiter.context_tokens,
                avoid=waiter.avoid,
                ignore_capacity=ignore_capacity,
            )
            if place is NoReplica.FULL:
                return False
            if isinstance(place, str):
                self._last_place_at = self._clock.now()
            if not waiter.answer.done():
                waiter.answer.set_result(place if isinstance(place, str) else None)
        return True

    def _break_stall(self) -> None:
        if self._clock.now() - self._last_place_at < self._stall_s:
            return
        if (oldest := self.router.oldest_waiting) is not None:
            _log.warning(
                "no session got a slot for %g s and %d are waiting: %s proceeds without room",
                self._stall_s,
                len(self.router.waiting),
                oldest,
            )
            self._serve(oldest, ignore_capacity=True)

    def _renew(self, session_id: str) -> None:
        if self._lease_s is not None:
            self._renewed[session_id] = self._clock.now()
            self._renewed.move_to_end(session_id)

    def _expire(self) -> None:
        """Finishes the sessions whose lease has expired."""
        if self._lease_s is None:
            return
        while self._renewed:  # in the order of renewal
            session_id, renewed = next(iter(self._renewed.items()))
            if renewed + self._lease_s > self._clock.now():
                return
            _log.warning(
                "session %s at %s was idle for %g s: it is dropped and its slot is free",
                session_id,
                self.router.pinned(session_id),
                self._lease_s,
            )
            self.close(session_id)
