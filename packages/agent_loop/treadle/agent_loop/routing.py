"""Routing: which replica a session goes to. Pure: no clock, no socket, no task.

Invariants of `StickySession`:

1. A session keeps its replica (its prefix is in that cache) until it is finished, the replica is
   to be avoided or gone, or the replica holds more than `margin` sessions above the least loaded.
2. A new session goes to the least loaded replica; among equals to the one chosen longest ago, so
   that no replica starves under light traffic.
3. A replica's load is the number of its unfinished sessions; every session counts once.
4. A draining replica gets no new session and keeps the ones it has.

One owner calls it from one task at a time. Whoever opens a session finishes it: capacity comes
back by `finish`, not by forgetting (least-recently-used caches cannot release capacity).
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol


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
    """Assigns sessions to replicas."""

    def pick(self, session_id: str, *, avoid: Collection[str] = ()) -> str | None:
        """Returns the address for a session's next request; None when none is left.

        Args:
            session_id: The trajectory. Opens the session if it is new.
            avoid: Replicas that must not be chosen now; a session pinned to one is moved.
        """
        ...

    def finish(self, session_id: str) -> None:
        """Frees the session's place. Idempotent."""
        ...


class LeastLoaded:
    """The policy for new sessions: fewest sessions, then chosen longest ago."""

    def choose(self, candidates: Iterable[ReplicaLoad]) -> ReplicaLoad | None:
        """Returns the candidate to use; None when there is none."""
        return min(candidates, key=lambda r: (r.sessions, r.last_chosen), default=None)


class StickySession:
    """Keeps sessions where they are, unless that is unfair or impossible.

    Args:
        addresses: The replicas at start.
        margin: How many sessions above the least loaded a replica may hold before its next
            request moves; at least 1.

    Raises:
        ValueError: The margin is below 1, or an address is given twice.
    """

    def __init__(self, addresses: Iterable[str] = (), *, margin: int = 8) -> None:
        if margin < 1:
            raise ValueError(f"margin is {margin}; it must be at least 1")
        self._margin = margin
        self._policy = LeastLoaded()
        self._choices = 0
        self._last_chosen: dict[str, int] = {}
        self._sessions: dict[str, set[str]] = {}
        self._draining: set[str] = set()
        self._pins: dict[str, str] = {}
        for address in addresses:
            if address in self._sessions:
                raise ValueError(f"replica {address} is given twice")
            self.add(address)

    @property
    def addresses(self) -> tuple[str, ...]:
        """All replicas, in the order in which they were added."""
        return tuple(self._sessions)

    def load(self, address: str) -> int:
        """Unfinished sessions pinned to a replica.

        Raises:
            KeyError: There is no such replica.
        """
        return len(self._sessions[address])

    def add(self, address: str) -> None:
        """Adds a replica, or brings a draining one back. Idempotent."""
        self._sessions.setdefault(address, set())
        self._last_chosen.setdefault(address, -1)
        self._draining.discard(address)

    def drain(self, address: str) -> int:
        """Takes no new session there; returns how many are open.

        Raises:
            KeyError: There is no such replica.
        """
        self._draining.add(address)
        return self.load(address)

    def remove(self, address: str) -> None:
        """Forgets a replica; its sessions get another at their next pick. Idempotent."""
        for session_id in self._sessions.pop(address, set()):
            del self._pins[session_id]
        self._last_chosen.pop(address, None)
        self._draining.discard(address)

    def pick(self, session_id: str, *, avoid: Collection[str] = ()) -> str | None:
        """Returns the address for a session's next request; None when none is left."""
        pinned = self._pins.get(session_id)
        least = self._policy.choose(
            ReplicaLoad(
                address=address,
                sessions=len(sessions) - (session_id in sessions),
                last_chosen=self._last_chosen[address],
            )
            for address, sessions in self._sessions.items()
            if address not in avoid and address not in self._draining
        )
        if pinned is not None and pinned not in avoid:
            others = len(self._sessions[pinned]) - 1
            if least is None or others - least.sessions <= self._margin:
                return pinned
        if least is None:
            return None
        self._move(session_id, least.address)
        return least.address

    def finish(self, session_id: str) -> None:
        """Frees the session's place. Idempotent."""
        if (address := self._pins.pop(session_id, None)) is not None:
            self._sessions[address].discard(session_id)

    def _move(self, session_id: str, address: str) -> None:
        self.finish(session_id)
        self._pins[session_id] = address
        self._sessions[address].add(session_id)
        self._last_chosen[address] = self._choices
        self._choices += 1
