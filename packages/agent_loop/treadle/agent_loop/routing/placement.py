"""Placement: the policies that choose a replica for a session. Pure: no clock, socket or task.

Invariants of `StickySession`:

1. A session keeps its replica, whose cache holds its prefix, until the session is finished, the
   replica is removed or must be avoided, or the replica holds more than `margin` sessions above
   the least loaded one.
2. A new session goes to the least loaded replica, and among equals to the one chosen longest ago,
   so that no replica starves under light traffic.
3. A replica's load is the number of its unfinished sessions, whether they generate or wait for a
   tool: each of them occupies cache and will continue. Every session counts once.
4. A draining replica gets no new session and keeps the ones it has.
5. With `cache_tokens`, a replica accepts a session only while the contexts of its sessions fit
   its cache; other sessions wait, oldest first. Sessions that overfill a shared cache evict one
   another, and each of their turns then computes its whole prompt again. Contexts grow, so a
   replica that has grown past the bound gives up its youngest sessions. The oldest session of a
   replica never loses its slot, so every session ends.

`HashedSession` is the deterministic mode.

Measurements (`benchmarks/routing_replay.py`): the bound of invariant 5 matters more than the
choice among replicas; the number of sessions is a better load than that of running requests; and
the margin must be wide, because each move costs a whole prefix.

One owner calls a router from one task at a time. The caller that opens a session must finish it:
only `finish` releases capacity (a least-recently-used table could not).
"""

import hashlib
import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from treadle.agent_loop.routing.session_table import (
    NoReplica,
    ReplicaEntry,
    ReplicaOrder,
    RoutedSession,
    SessionTable,
    by_load,
    by_room,
)

_SHED_ABOVE = 1.1
"""Fraction of the cache above which the youngest sessions lose their slot. It exceeds 1 so that a
session that was just accepted is not given up at its next turn. Prompts that sessions share are
counted once per session, so the real use is lower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """The load of one replica, as a policy sees it.

    Attributes:
        sessions: Number of unfinished sessions that are pinned to it.
        last_chosen: Number of the choice that last picked it; -1 if none did.
    """

    address: str
    sessions: int
    last_chosen: int


class Router(Protocol):
    """Assigns sessions to replicas; holds the table of both."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """All replicas, in the order in which they were added."""
        ...

    @property
    def draining(self) -> frozenset[str]:
        """The replicas that accept no new session."""
        ...

    def load(self, address: str) -> int:
        """Returns the number of unfinished sessions pinned to a replica.

        Raises:
            KeyError: There is no such replica.
        """
        ...

    def pinned(self, session_id: str) -> str | None:
        """Returns the session's replica, or None if it has none."""
        ...

    def add(self, address: str) -> None:
        """Adds a replica, or ends the draining of one. Idempotent."""
        ...

    def drain(self, address: str) -> int:
        """Stops giving a replica new sessions; returns the number that are open there.

        Raises:
            KeyError: There is no such replica.
        """
        ...

    def remove(self, address: str) -> None:
        """Removes a replica; its sessions get another one at their next pick. Idempotent."""
        ...

    def pick(
        self,
        session_id: str,
        *,
        context_tokens: int = 0,
        at: str | None = None,
        avoid: Collection[str] = (),
        ignore_capacity: bool = False,
    ) -> str | NoReplica:
        """Returns the address for a session's next request, or why there is none.

        Args:
            session_id: The trajectory's session; opened if it is new.
            context_tokens: Length of the request's prompt.
            at: The replica that a session new to this router used until now; None if none.
            avoid: Replicas that must not be chosen now; a session pinned to one is moved.
        """
        ...

    @property
    def waiting(self) -> tuple[str, ...]:
        """The sessions that got FULL and wait for a slot, oldest first."""
        ...

    @property
    def oldest_waiting(self) -> str | None:
        """The oldest of them, which gets the next slot; None if none waits."""
        ...

    def stop_waiting(self, session_id: str) -> None:
        """Removes a session from those that wait for a slot, because its caller has left."""
        ...

    def finish(self, session_id: str) -> bool:
        """Frees the session's slot; returns False if it was not open. Idempotent."""
        ...


class LeastLoaded:
    """The policy for new sessions: fewest sessions, then chosen longest ago."""

    @staticmethod
    def order(sessions: int, last_chosen: int) -> tuple[int, int]:
        """Returns the key of a replica; the replica with the smallest one is used."""
        return sessions, last_chosen

    def choose(self, candidates: Iterable[ReplicaLoad]) -> ReplicaLoad | None:
        """Returns the candidate to use, or None if there is none."""
        return min(candidates, key=lambda r: self.order(r.sessions, r.last_chosen), default=None)


class StickySession(SessionTable):
    """Keeps each session on its replica, unless that is unfair or impossible.

    Args:
        margin: Number of sessions that a replica may hold above the least loaded one before its
            next request moves; at least 1.
        cache_tokens: Number of tokens that each replica's prefix cache holds; None means that
            contexts are not bounded.

    Raises:
        ValueError: The margin or cache_tokens is below 1, or an address is given twice.
    """

    def __init__(
        self,
        addresses: Iterable[str] = (),
        *,
        margin: int = 8,
        cache_tokens: int | None = None,
    ) -> None:
        if margin < 1:
            raise ValueError(f"margin is {margin}; it must be at least 1")
        if cache_tokens is not None and cache_tokens < 1:
            raise ValueError(f"cache_tokens is {cache_tokens}; it must be at least 1, or None")
        self._margin = margin
        self._cache_tokens = cache_tokens
        self._choices = 0
        self._waiting: dict[str, RoutedSession] = {}
        # A heap of those that wait, and of some that no longer do, which are passed over.
        self._by_age: list[tuple[int, RoutedSession]] = []
        self._by_load, self._by_room = ReplicaOrder(by_load), ReplicaOrder(by_room)
        bounded = (self._by_room,) if cache_tokens is not None else ()
        super().__init__(addresses, orders=(self._by_load, *bounded))

    def pick(
        self,
        session_id: str,
        *,
        context_tokens: int = 0,
        at: str | None = None,
        avoid: Collection[str] = (),
        ignore_capacity: bool = False,
    ) -> str | NoReplica:
        """Returns the address for a session's next request; see `Router.pick`."""
        session = self._open(session_id, context_tokens, at)
        placed = session.replica
        if placed is not None:
            self._shed(placed)
        if session.replica is not None and session.replica.address not in avoid:
            return self._stay_or_move(session, session.replica, avoid)
        accepting = self._least_accepting(avoid)
        if session.replica is not None:
            # Its replica fails: the session moves at once, even if no other replica has room.
            return self._place(session, accepting)
        if not accepting:
            self._waiting.pop(session_id, None)
            return self._unavailable(session)
        if ignore_capacity:
            return self._place(session, accepting)
        self._wait(session)
        if self._oldest() is not session:
            return NoReplica.FULL
        if not self._has_room(accepting[0], session):
            # Most decisions of a full cluster end here, without a search.
            roomiest = self._by_room.least()
            if roomiest is None or not self._has_room(roomiest, session):
                return NoReplica.FULL
            accepting = [r for r in self._accepting(avoid) if self._has_room(r, session)]
        return self._place(session, accepting)

    @property
    def waiting(self) -> tuple[str, ...]:
        """The sessions that got FULL and wait for a slot, oldest first."""
        return tuple(s.name for s in sorted(self._waiting.values(), key=lambda s: s.age))

    @property
    def oldest_waiting(self) -> str | None:
        """The oldest of them, which gets the next slot; None if none waits."""
        oldest = self._oldest()
        return None if oldest is None else oldest.name

    def _wait(self, session: RoutedSession) -> None:
        if session.name in self._waiting:
            return
        self._waiting[session.name] = session
        heapq.heappush(self._by_age, (session.age, session))
        if len(self._by_age) > 64 + 4 * len(self._waiting):
            self._by_age = [(each.age, each) for each in self._waiting.values()]
            heapq.heapify(self._by_age)

    def _oldest(self) -> RoutedSession | None:
        heap = self._by_age
        while heap and self._waiting.get(heap[0][1].name) is not heap[0][1]:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def stop_waiting(self, session_id: str) -> None:
        """Removes a session from those that wait for a slot, because its caller has left."""
        self._waiting.pop(session_id, None)

    def finish(self, session_id: str) -> bool:
        """Frees the session's slot; returns False if it was not open. Idempotent."""
        self.stop_waiting(session_id)
        return super().finish(session_id)

    def _stay_or_move(
        self, session: RoutedSession, placed: ReplicaEntry, avoid: Collection[str]
    ) -> str | NoReplica:
        # The least load of those that may be chosen is a bound: most turns need no search.
        bound = self._least_accepting(avoid)
        if not bound or len(placed.sessions) - 1 - len(bound[0].sessions) <= self._margin:
            return placed.address
        accepting = self._accepting(avoid)
        others = [r for r in accepting if r is not placed and self._has_room(r, session)]
        least = self._least(others)
        if least is not None and len(placed.sessions) - 1 - len(least.sessions) > self._margin:
            return self._place(session, [least])
        return placed.address

    def _place(self, session: RoutedSession, candidates: list[ReplicaEntry]) -> str | NoReplica:
        chosen = self._least(candidates)
        if chosen is None:
            return NoReplica.FULL if session.name in self._waiting else NoReplica.UNAVAILABLE
        self._waiting.pop(session.name, None)
        if session.replica is not None:
            session.replica.drop(session)
        chosen.last_chosen = self._choices
        self._choices += 1
        chosen.put(session)
        return chosen.address

    def _least_accepting(self, avoid: Collection[str]) -> list[ReplicaEntry]:
        """Returns the least loaded replica that accepts sessions; [] if none does."""
        least = self._by_load.least_of(lambda r: not r.draining and r.address not in avoid)
        return [] if least is None else [least]

    def _least(self, replicas: list[ReplicaEntry]) -> ReplicaEntry | None:
        # As `LeastLoaded.choose`, without an object per replica: clusters have a thousand.
        order = LeastLoaded.order
        return min(replicas, key=lambda r: order(len(r.sessions), r.last_chosen), default=None)

    def _has_room(self, replica: ReplicaEntry, session: RoutedSession) -> bool:
        if self._cache_tokens is None or not replica.sessions:
            return True
        return replica.context_tokens + session.context_tokens <= self._cache_tokens

    def _shed(self, replica: ReplicaEntry) -> None:
        """Takes the slots of the youngest sessions until the others fit."""
        if self._cache_tokens is None:
            return
        while (
            len(replica.sessions) > 1 and replica.context_tokens > _SHED_ABOVE * self._cache_tokens
        ):
            replica.drop(max(replica.sessions.values(), key=lambda session: session.age))


class HashedSession(SessionTable):
    """The deterministic mode: the choice does not depend on earlier choices.

    Uses rendezvous hashing: of the replicas that accept sessions, a new session goes to the one
    with the largest blake2b hash of the replica's address and the session's id up to its last "/"
    (the part after it differs per attempt). So the order of the replicas does not matter, workers
    agree without communication, and adding or removing a replica only moves that replica's share
    of the sessions. Loads are ignored. An open session stays where it is while its replica drains.

    Raises:
        ValueError: An address is given twice.
    """

    def pick(
        self,
        session_id: str,
        *,
        context_tokens: int = 0,
        at: str | None = None,
        avoid: Collection[str] = (),
        ignore_capacity: bool = False,
    ) -> str | NoReplica:
        """Returns the address for a session's next request; see `Router.pick`."""
        session = self._open(session_id, context_tokens, at)
        placed = session.replica
        if placed is not None and placed.address not in avoid:
            return placed.address
        accepting = self._accepting(avoid)
        if not accepting:
            return self._unavailable(session)
        if placed is not None:
            placed.drop(session)
        chosen = max(accepting, key=lambda replica: _weight(replica.address, session_id))
        chosen.put(session)
        return chosen.address


def _weight(address: str, session_id: str) -> bytes:
    name = session_id.rpartition("/")[0] or session_id
    return hashlib.blake2b(f"{address}\n{name}".encode(), digest_size=16).digest()
