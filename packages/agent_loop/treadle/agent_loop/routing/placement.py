"""Routing: which replica a session goes to. Pure: no clock, no socket, no task.

Invariants of `StickySession`:

1. A session keeps its replica (its prefix is in that cache) until it is finished, the replica is
   to be avoided or gone, or the replica holds more than `margin` sessions above the least loaded.
2. A new session goes to the least loaded replica; among equals to the one chosen longest ago, so
   that no replica starves under light traffic.
3. A replica's load is the number of its unfinished sessions, whether they generate or wait for a
   tool: each of them holds cache and will come back. Every session counts once.
4. A draining replica gets no new session and keeps the ones it has.
5. With `cache_tokens` a replica takes a session only while the contexts of its sessions fit its
   cache. What does not fit has no place and waits, oldest first: sessions that share a cache
   which cannot hold them all evict one another, and each of their turns computes its whole
   prompt again. Contexts grow; a replica that has grown past the bound gives up its youngest.
   The oldest session of a replica never loses its place, so every session ends.

`HashedSession` is the deterministic mode.

What was measured (`benchmarks/routing_replay.py`): the bound is worth more than every choice among
replicas; sessions are a better load than running requests; and a margin must be wide, because each
move costs a whole prefix.

One owner calls a router from one task at a time. Whoever opens a session finishes it: capacity
comes back by `finish`, not by forgetting (least-recently-used caches cannot release capacity).
"""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from treadle.agent_loop.routing.session_table import Holder, Nowhere, OpenSession, SessionTable

_SHED_ABOVE = 1.1
"""Share of the cache at which the youngest sessions lose their place. Above 1, so that a session
just taken is not given up at the next turn; sessions share prompts, which are counted for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """One replica as a policy sees it.

    Attributes:
        address: Names it.
        sessions: Unfinished sessions that are pinned to it.
        last_chosen: Grows with each choice; -1 when it was never chosen.
    """

    address: str
    sessions: int
    last_chosen: int


class Router(Protocol):
    """Assigns sessions to replicas, and knows which replicas there are."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """All replicas, in the order in which they were added."""
        ...

    @property
    def draining(self) -> frozenset[str]:
        """Those that take no new session."""
        ...

    def load(self, address: str) -> int:
        """Unfinished sessions pinned to a replica. KeyError: there is no such replica."""
        ...

    def pinned(self, session_id: str) -> str | None:
        """The session's replica; None when it has none."""
        ...

    def add(self, address: str) -> None:
        """Adds a replica, or brings a draining one back. Idempotent."""
        ...

    def drain(self, address: str) -> int:
        """Takes no new session there; returns how many are open. KeyError: no such replica."""
        ...

    def remove(self, address: str) -> None:
        """Forgets a replica; its sessions get another at their next pick. Idempotent."""
        ...

    def pick(
        self,
        session_id: str,
        *,
        context_tokens: int = 0,
        at: str | None = None,
        avoid: Collection[str] = (),
        room_or_not: bool = False,
    ) -> str | Nowhere:
        """Returns the address for a session's next request, or why there is none.

        Args:
            session_id: The trajectory. Opens the session if it is new.
            context_tokens: Length of the request's prompt.
            at: For a session that is new here: where it has been until now, if anywhere.
            avoid: Replicas that must not be chosen now; a session pinned to one is moved.
            room_or_not: Never answer FULL.
        """
        ...

    @property
    def waiting(self) -> tuple[str, ...]:
        """Sessions that were told FULL and wait for a place, oldest first."""
        ...

    def leave(self, session_id: str) -> None:
        """Says that nobody asks for the session now: it stops to wait for a place."""
        ...

    def finish(self, session_id: str) -> bool:
        """Frees the session's place; False when it was not open. Idempotent."""
        ...


class LeastLoaded:
    """The policy for new sessions: fewest sessions, then chosen longest ago."""

    def choose(self, candidates: Iterable[ReplicaLoad]) -> ReplicaLoad | None:
        """Returns the candidate to use; None when there is none."""
        return min(candidates, key=lambda r: (r.sessions, r.last_chosen), default=None)


class StickySession(SessionTable):
    """Keeps sessions where they are, unless that is unfair or impossible.

    Args:
        addresses: The replicas at start.
        margin: How many sessions above the least loaded a replica may hold before its next
            request moves; at least 1.
        cache_tokens: Tokens that each replica's prefix cache holds; None: contexts are not bounded.

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
        self._policy = LeastLoaded()
        self._choices = 0
        self._waiting: dict[str, OpenSession] = {}
        super().__init__(addresses)

    def pick(
        self,
        session_id: str,
        *,
        context_tokens: int = 0,
        at: str | None = None,
        avoid: Collection[str] = (),
        room_or_not: bool = False,
    ) -> str | Nowhere:
        """Returns the address for a session's next request; see `Router.pick`."""
        session = self._open(session_id, context_tokens, at)
        placed = session.replica
        if placed is not None:
            self._shed(placed)
        takers = self._takers(avoid)
        if session.replica is not None:
            if session.replica.address not in avoid:
                return self._stay_or_move(session, session.replica, takers)
            # Its replica fails it: it goes on elsewhere, room or not, and is not made to wait.
            return self._place(session, takers)
        if not takers:
            self._waiting.pop(session_id, None)
            return self._nowhere(session)
        if room_or_not:
            return self._place(session, takers)
        self._waiting[session_id] = session
        if any(other.age < session.age for other in self._waiting.values()):
            return Nowhere.FULL
        return self._place(session, [r for r in takers if self._has_room(r, session)])

    @property
    def waiting(self) -> tuple[str, ...]:
        """Sessions that were told FULL and wait for a place, oldest first."""
        return tuple(s.name for s in sorted(self._waiting.values(), key=lambda s: s.age))

    def leave(self, session_id: str) -> None:
        """Says that nobody asks for the session now: it stops to wait for a place."""
        self._waiting.pop(session_id, None)

    def finish(self, session_id: str) -> bool:
        """Frees the session's place; False when it was not open. Idempotent."""
        self.leave(session_id)
        return super().finish(session_id)

    def _stay_or_move(
        self, session: OpenSession, placed: Holder, takers: list[Holder]
    ) -> str | Nowhere:
        others = [r for r in takers if r is not placed and self._has_room(r, session)]
        least = self._least(others)
        if least is not None and len(placed.sessions) - 1 - len(least.sessions) > self._margin:
            return self._place(session, [least])
        return placed.address

    def _place(self, session: OpenSession, candidates: list[Holder]) -> str | Nowhere:
        chosen = self._least(candidates)
        if chosen is None:
            return Nowhere.FULL if session.name in self._waiting else Nowhere.NO_REPLICA
        self._waiting.pop(session.name, None)
        if session.replica is not None:
            session.replica.drop(session)
        chosen.put(session)
        chosen.last_chosen = self._choices
        self._choices += 1
        return chosen.address

    def _least(self, replicas: list[Holder]) -> Holder | None:
        chosen = self._policy.choose(
            ReplicaLoad(
                address=replica.address,
                sessions=len(replica.sessions),
                last_chosen=replica.last_chosen,
            )
            for replica in replicas
        )
        return None if chosen is None else self._holders[chosen.address]

    def _has_room(self, replica: Holder, session: OpenSession) -> bool:
        if self._cache_tokens is None or not replica.sessions:
            return True
        return replica.context_tokens + session.context_tokens <= self._cache_tokens

    def _shed(self, replica: Holder) -> None:
        """Takes their places from the youngest, until the rest fits."""
        if self._cache_tokens is None:
            return
        while (
            len(replica.sessions) > 1 and replica.context_tokens > _SHED_ABOVE * self._cache_tokens
        ):
            replica.drop(max(replica.sessions.values(), key=lambda session: session.age))


class HashedSession(SessionTable):
    """The deterministic mode: where a session goes depends on nothing that happened before.

    A new session goes to the replica with the largest hash (blake2b) of the replica's address and
    the session's id up to its last "/" (what follows tells attempts apart), among those that take
    sessions now (rendezvous hashing). So the replicas may be listed in any order, any number of
    workers agree without talking, and a replica that comes or goes moves only the sessions of its
    own share. Loads are not looked at. An open session stays where it is while its replica drains.

    Args:
        addresses: The replicas at start.

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
        room_or_not: bool = False,
    ) -> str | Nowhere:
        """Returns the address for a session's next request; see `Router.pick`."""
        session = self._open(session_id, context_tokens, at)
        placed = session.replica
        if placed is not None and placed.address not in avoid:
            return placed.address
        takers = self._takers(avoid)
        if not takers:
            return self._nowhere(session)
        if placed is not None:
            placed.drop(session)
        chosen = max(takers, key=lambda replica: _weight(replica.address, session_id))
        chosen.put(session)
        return chosen.address


def _weight(address: str, session_id: str) -> bytes:
    name = session_id.rpartition("/")[0] or session_id
    return hashlib.blake2b(f"{address}\n{name}".encode(), digest_size=16).digest()
