"""The router's desk: where sessions ask for their replica and queue when there is no room.

Invariants:

1. Whoever is told FULL by the policy waits here, and is asked for again, oldest session first,
   when a session has finished or a replica was added, came back or went away.
2. A waiter that gives up (deadline, cancellation) holds nobody up behind it.
3. When nobody was given a place for `stall_s` and somebody waits, the first of them goes on, room
   or not: sessions that hold places may wait for it, as a conversation for its sub-agent's.
4. With a lease, a session that was neither asked for nor finished for `lease_s` is finished.

The caller waits in `open`, woken by `finish`, `add` and `remove`, bounded by `wait_s`. One event
loop owns it. It is before the policy in a worker's own process and in the routing service alike.
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
from treadle.agent_loop.routing.session_table import Nowhere

_log = logging.getLogger(__name__)


class Places(Protocol):
    """Where a client asks for its sessions' replicas: the desk, or the routing service."""

    async def open(
        self,
        session_id: str,
        *,
        context_tokens: int,
        avoid: Collection[str],
        wait_s: float,
    ) -> str | None:
        """Returns the address for a session's next request; None when no replica takes it.

        Args:
            session_id: Opened if it is new.
            context_tokens: Length of the request's prompt.
            avoid: Replicas that must not be named.
            wait_s: How long to wait for room.

        Raises:
            TimeoutError: No replica had room in time.
            GenerationError: The router does not answer, or refuses.
        """
        ...

    def finish(self, session_id: str) -> None:
        """Frees the session's place. Idempotent, never raises, never waits."""
        ...


@dataclass(slots=True, eq=False)
class _Waiter:
    context_tokens: int
    avoid: Collection[str]
    answer: asyncio.Future[str | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class RouterDesk:
    """A routing policy that can be waited for.

    Args:
        router: The policy; from now on the desk is its owner.
        clock: Times the leases.
        lease_s: See the invariants; None: sessions are open until they are finished.
        stall_s: See the invariants.
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
        """See `Places.open`.

        Args:
            session_id: As there.
            context_tokens: As there.
            avoid: As there.
            wait_s: As there.
            at: Where a session that is new here has been until now, if anywhere.
        """
        self._expire()
        place = self.router.pick(
            session_id, context_tokens=context_tokens, at=at, avoid=frozenset(avoid)
        )
        if place is Nowhere.NO_REPLICA:
            return None
        self._renew(session_id)
        if isinstance(place, str):
            self._last_place_at = self._clock.now()
            self._serve_waiters()  # a move, or a session that lost its place, made room
            return place
        return await self._wait(session_id, _Waiter(context_tokens, frozenset(avoid)), wait_s)

    def finish(self, session_id: str) -> None:
        """See `Places.finish`."""
        self.close(session_id)

    def close(self, session_id: str) -> bool:
        """Finishes a session; False when it is not open."""
        self._renewed.pop(session_id, None)
        known = self.router.finish(session_id)
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
        self._serve_waiters()

    async def _wait(self, session_id: str, waiter: _Waiter, wait_s: float) -> str | None:
        self._waiters.setdefault(session_id, []).append(waiter)
        try:
            async with asyncio.timeout(wait_s):
                while not waiter.answer.done():
                    self._break_stall()
                    await asyncio.wait([waiter.answer], timeout=self._stall_s)
                return waiter.answer.result()
        finally:
            others = self._waiters[session_id]
            others.remove(waiter)
            if not others:
                del self._waiters[session_id]
                self.router.leave(session_id)
                self._serve_waiters()

    def _serve_waiters(self) -> None:
        """Gives places to those who wait, oldest first, until there is none for the next."""
        for session_id in self.router.waiting:
            if not self._serve(session_id):
                return

    def _serve(self, session_id: str, *, room_or_not: bool = False) -> bool:
        """Answers those who wait with one session; False when there is no room."""
        for waiter in self._waiters[session_id]:
            place = self.router.pick(
                session_id,
                context_tokens=waiter.context_tokens,
                avoid=waiter.avoid,
                room_or_not=room_or_not,
            )
            if place is Nowhere.FULL:
                return False
            if isinstance(place, str):
                self._last_place_at = self._clock.now()
            if not waiter.answer.done():
                waiter.answer.set_result(place if isinstance(place, str) else None)
        return True

    def _break_stall(self) -> None:
        if self._clock.now() - self._last_place_at < self._stall_s:
            return
        if waiting := self.router.waiting:
            _log.warning(
                "no session was given a place for %g s, and %d wait: %s goes on without room",
                self._stall_s,
                len(waiting),
                waiting[0],
            )
            self._serve(waiting[0], room_or_not=True)

    def _renew(self, session_id: str) -> None:
        if self._lease_s is not None:
            self._renewed[session_id] = self._clock.now()
            self._renewed.move_to_end(session_id)

    def _expire(self) -> None:
        """Finishes the sessions whose lease ran out; they are in the order of their renewal."""
        if self._lease_s is None:
            return
        while self._renewed:
            session_id, renewed = next(iter(self._renewed.items()))
            if renewed + self._lease_s > self._clock.now():
                return
            _log.warning(
                "session %s at %s was not heard of for %g s: its place is free",
                session_id,
                self.router.pinned(session_id),
                self._lease_s,
            )
            self.close(session_id)
