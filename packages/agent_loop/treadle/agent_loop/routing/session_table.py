"""The session table: the replicas, and the sessions that are open on each of them.

Invariant: a session has at most one replica, which is in the table. A replica's sessions and its
context tokens are those of the sessions placed on it. A routing policy is a subclass that can
choose a replica; see `placement`. Pure.
"""

import enum
import heapq
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

_PASSED_SHARE = 16
"""Passing over a sixteenth of the replicas costs half of what a search of all of them costs."""


class NoReplica(enum.Enum):
    """Why a session has no replica."""

    UNAVAILABLE = "no replica accepts it: none is known, all drain, or all are to be avoided"
    FULL = "no replica has room for it: it waits for a session to finish"


@dataclass(slots=True, eq=False)
class RoutedSession:
    """An open session.

    Attributes:
        age: Number of sessions opened before it.
        replica: None while it waits for its first replica, or after it has lost its slot.
        context_tokens: Length of its latest prompt.
    """

    name: str
    age: int
    replica: "ReplicaEntry | None" = None
    context_tokens: int = 0


@dataclass(slots=True, eq=False)
class ReplicaEntry:
    """A replica and the sessions that are placed on it.

    Attributes:
        number: Number of replicas that were added before it.
        orders: Each is notified when the sessions or their lengths change.
        draining: Whether it accepts no new session.
        last_chosen: Number of the choice that last picked it; -1 if none did.
        sessions: Sessions that are placed on it, by name.
    """

    address: str
    number: int
    orders: tuple["ReplicaOrder", ...]
    draining: bool = False
    last_chosen: int = -1
    context_tokens: int = 0
    sessions: dict[str, RoutedSession] = field(default_factory=dict)

    def put(self, session: RoutedSession) -> None:
        """Places a session that has no replica."""
        session.replica = self
        self.sessions[session.name] = session
        self.context_tokens += session.context_tokens
        self._changed()

    def drop(self, session: RoutedSession) -> None:
        """Takes away the slot of a session that is placed here."""
        session.replica = None
        del self.sessions[session.name]
        self.context_tokens -= session.context_tokens
        self._changed()

    def resize(self, session: RoutedSession, context_tokens: int) -> None:
        """Notes another length of a session that is placed here."""
        self.context_tokens += context_tokens - session.context_tokens
        session.context_tokens = context_tokens
        self._changed()

    def _changed(self) -> None:
        for order in self.orders:
            order.changed(self)


def by_load(replica: ReplicaEntry) -> tuple[int, int]:
    """Orders replicas by their number of sessions, then by when they were chosen last."""
    return len(replica.sessions), replica.last_chosen


def by_room(replica: ReplicaEntry) -> tuple[int, int]:
    """Orders replicas by the length of their contexts; among equals, one without sessions first."""
    return replica.context_tokens, len(replica.sessions)


class ReplicaOrder:
    """The replicas by a key, so that the first one is known without a search.

    Invariant: for each replica, the heap has an entry with its present key. Other entries are
    stale: they are passed over, and the heap is made again when most of it is stale. A change costs
    the logarithm of the number of replicas.
    """

    def __init__(self, key: Callable[[ReplicaEntry], tuple[int, int]]) -> None:
        self._key = key
        self._heap: list[tuple[tuple[int, int], int, ReplicaEntry]] = []
        self._replicas: set[ReplicaEntry] = set()

    def add(self, replica: ReplicaEntry) -> None:
        """Adds a replica."""
        self._replicas.add(replica)
        self.changed(replica)

    def remove(self, replica: ReplicaEntry) -> None:
        """Removes a replica."""
        self._replicas.remove(replica)

    def changed(self, replica: ReplicaEntry) -> None:
        """Notes that the key of a replica may have changed."""
        heapq.heappush(self._heap, self._entry(replica))
        if len(self._heap) > 64 + 4 * len(self._replicas):
            self._heap = [self._entry(each) for each in self._replicas]
            heapq.heapify(self._heap)

    def least(self) -> ReplicaEntry | None:
        """Returns the first replica; of several with the same key the one that was added first."""
        while self._heap:
            key, _, replica = self._heap[0]
            if replica in self._replicas and key == self._key(replica):
                return replica
            heapq.heappop(self._heap)
        return None

    def least_of(self, replicas: Callable[[ReplicaEntry], bool]) -> ReplicaEntry | None:
        """Returns the first replica for which the function is true, as `least` does.

        Passes over a few others, which costs a logarithm for each, and else searches all.
        """
        passed: dict[ReplicaEntry, tuple[tuple[int, int], int, ReplicaEntry]] = {}
        while len(passed) <= len(self._replicas) // _PASSED_SHARE:
            first = self.least()
            if first is None or replicas(first):
                break
            passed[first] = heapq.heappop(self._heap)
        else:
            left = [each for each in self._replicas if replicas(each)]
            first = min(left, key=self._entry, default=None)
        for entry in passed.values():
            heapq.heappush(self._heap, entry)
        return first

    def _entry(self, replica: ReplicaEntry) -> tuple[tuple[int, int], int, ReplicaEntry]:
        return self._key(replica), replica.number, replica


class SessionTable:
    """The replicas and their open sessions; the common part of both policies.

    Args:
        orders: Orders of the replicas that the policy needs.

    Raises:
        ValueError: An address is given twice.
    """

    def __init__(
        self, addresses: Iterable[str] = (), *, orders: tuple[ReplicaOrder, ...] = ()
    ) -> None:
        self._replicas: dict[str, ReplicaEntry] = {}
        self._orders = orders
        self._added = 0
        self._sessions: dict[str, RoutedSession] = {}
        self._opened = 0
        for address in addresses:
            if address in self._replicas:
                raise ValueError(f"replica {address} is given twice")
            self.add(address)

    @property
    def addresses(self) -> tuple[str, ...]:
        """All replicas, in the order in which they were added."""
        return tuple(self._replicas)

    @property
    def draining(self) -> frozenset[str]:
        """The replicas that accept no new session."""
        return frozenset(a for a, replica in self._replicas.items() if replica.draining)

    @property
    def num_sessions(self) -> int:
        """Number of open sessions, with and without a slot."""
        return len(self._sessions)

    def load(self, address: str) -> int:
        """Returns the number of unfinished sessions pinned to a replica.

        Raises:
            KeyError: There is no such replica.
        """
        return len(self._replicas[address].sessions)

    def pinned(self, session_id: str) -> str | None:
        """Returns the session's replica, or None if it has none."""
        session = self._sessions.get(session_id)
        return None if session is None or session.replica is None else session.replica.address

    def add(self, address: str) -> None:
        """Adds a replica, or ends the draining of one. Idempotent."""
        replica = self._replicas.get(address)
        if replica is None:
            replica = ReplicaEntry(address, self._added, self._orders)
            self._replicas[address] = replica
            for order in self._orders:
                order.add(replica)
            self._added += 1
        replica.draining = False

    def drain(self, address: str) -> int:
        """Stops giving a replica new sessions; returns the number that are open there.

        Raises:
            KeyError: There is no such replica.
        """
        self._replicas[address].draining = True
        return self.load(address)

    def remove(self, address: str) -> None:
        """Removes a replica; its sessions get another one at their next pick. Idempotent."""
        if (replica := self._replicas.pop(address, None)) is not None:
            for session in list(replica.sessions.values()):
                replica.drop(session)
            for order in self._orders:
                order.remove(replica)

    @property
    def waiting(self) -> tuple[str, ...]:
        """The sessions that got FULL and wait for a slot, oldest first."""
        return ()

    @property
    def oldest_waiting(self) -> str | None:
        """The oldest of them; None if none waits."""
        return None

    def stop_waiting(self, session_id: str) -> None:
        """Removes a session from those that wait for a slot, because its caller has left."""

    def finish(self, session_id: str) -> bool:
        """Frees the session's slot; returns False if it was not open. Idempotent."""
        session = self._sessions.pop(session_id, None)
        if session is not None and session.replica is not None:
            session.replica.drop(session)
        return session is not None

    def _open(self, session_id: str, context_tokens: int, at: str | None) -> RoutedSession:
        """Returns the session with its new length; a new one is placed at `at`, if given."""
        session = self._sessions.get(session_id)
        if session is None:
            session = RoutedSession(session_id, self._opened)
            self._opened += 1
            self._sessions[session_id] = session
            if at in self._replicas:
                self._replicas[at].put(session)
        if session.replica is None:
            session.context_tokens = context_tokens
        elif session.context_tokens != context_tokens:
            session.replica.resize(session, context_tokens)
        return session

    def _accepting(self, avoid: Collection[str]) -> list[ReplicaEntry]:
        return [
            replica
            for replica in self._replicas.values()
            if not replica.draining and replica.address not in avoid
        ]

    def _unavailable(self, session: RoutedSession) -> NoReplica:
        # A session without a replica is not kept: its caller might never finish it.
        if session.replica is None:
            del self._sessions[session.name]
        return NoReplica.UNAVAILABLE
