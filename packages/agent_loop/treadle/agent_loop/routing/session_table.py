"""The session table: the replicas, and which session is open on which of them.

Invariant: a session has at most one replica, which is in the table; the sessions and the context
tokens of a replica are those of the sessions that have it. A routing policy is a table that knows
how to choose; see `routing`. Pure.
"""

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field


class Nowhere(enum.Enum):
    """Why a session has no replica."""

    NO_REPLICA = "no replica takes it: none is known, all drain, or all are to be avoided"
    FULL = "no replica has room for it: it waits for a session to finish"


@dataclass(slots=True, eq=False)
class OpenSession:
    """An open session. Without a replica it has lost it, or waits for its first."""

    name: str
    age: int
    replica: "Holder | None" = None
    context_tokens: int = 0


@dataclass(slots=True, eq=False)
class Holder:
    """A replica and the sessions that have it."""

    address: str
    draining: bool = False
    last_chosen: int = -1
    context_tokens: int = 0
    sessions: dict[str, OpenSession] = field(default_factory=dict)

    def put(self, session: OpenSession) -> None:
        """Gives the replica to a session that has none."""
        session.replica = self
        self.sessions[session.name] = session
        self.context_tokens += session.context_tokens

    def drop(self, session: OpenSession) -> None:
        """Takes it from one that has it."""
        session.replica = None
        del self.sessions[session.name]
        self.context_tokens -= session.context_tokens


class SessionTable:
    """The replicas and the sessions that are open on them: what both routers share."""

    def __init__(self, addresses: Iterable[str] = ()) -> None:
        self._holders: dict[str, Holder] = {}
        self._sessions: dict[str, OpenSession] = {}
        self._opened = 0
        for address in addresses:
            if address in self._holders:
                raise ValueError(f"replica {address} is given twice")
            self.add(address)

    @property
    def addresses(self) -> tuple[str, ...]:
        """All replicas, in the order in which they were added."""
        return tuple(self._holders)

    @property
    def draining(self) -> frozenset[str]:
        """Those that take no new session."""
        return frozenset(a for a, replica in self._holders.items() if replica.draining)

    @property
    def num_sessions(self) -> int:
        """Open sessions, with and without a place."""
        return len(self._sessions)

    def load(self, address: str) -> int:
        """Unfinished sessions pinned to a replica.

        Raises:
            KeyError: There is no such replica.
        """
        return len(self._holders[address].sessions)

    def pinned(self, session_id: str) -> str | None:
        """The session's replica; None when it has none."""
        session = self._sessions.get(session_id)
        return None if session is None or session.replica is None else session.replica.address

    def add(self, address: str) -> None:
        """Adds a replica, or brings a draining one back. Idempotent."""
        self._holders.setdefault(address, Holder(address)).draining = False

    def drain(self, address: str) -> int:
        """Takes no new session there; returns how many are open.

        Raises:
            KeyError: There is no such replica.
        """
        self._holders[address].draining = True
        return self.load(address)

    def remove(self, address: str) -> None:
        """Forgets a replica; its sessions get another at their next pick. Idempotent."""
        if (replica := self._holders.pop(address, None)) is not None:
            for session in list(replica.sessions.values()):
                replica.drop(session)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Sessions that were told FULL and wait for a place, oldest first."""
        return ()

    def leave(self, session_id: str) -> None:
        """Says that nobody asks for the session now: it stops to wait for a place."""

    def finish(self, session_id: str) -> bool:
        """Frees the session's place; False when it was not open. Idempotent."""
        session = self._sessions.pop(session_id, None)
        if session is not None and session.replica is not None:
            session.replica.drop(session)
        return session is not None

    def _open(self, session_id: str, context_tokens: int, at: str | None) -> OpenSession:
        """Returns the session with its new length; one that says where it is stays there."""
        session = self._sessions.get(session_id)
        if session is None:
            session = OpenSession(session_id, self._opened)
            self._opened += 1
            self._sessions[session_id] = session
            if at in self._holders:
                self._holders[at].put(session)
        if session.replica is not None:
            session.replica.context_tokens += context_tokens - session.context_tokens
        session.context_tokens = context_tokens
        return session

    def _takers(self, avoid: Collection[str]) -> list[Holder]:
        return [
            replica
            for replica in self._holders.values()
            if not replica.draining and replica.address not in avoid
        ]

    def _nowhere(self, session: OpenSession) -> Nowhere:
        # Without a place it is not kept: nobody might ever finish it.
        if session.replica is None:
            del self._sessions[session.name]
        return Nowhere.NO_REPLICA
