"""The rotation: the servers of a run, those that are dead, starting or leaving, and the routes.

Invariants:

1. No call samples from weights that are older than those that all servers have: one that was
   started again refuses it, before anybody has noticed (`Routes.weight_version`).
2. Listeners (`on_change`) are called after each change of the routes.

Nothing here starts a server or gives it weights: see `server_starter.py` and `server_pool.py`.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from treadle.agent_loop.rpc import GrpcTokenGenerator
from treadle.policy.client.process import with_log
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.rollout.v1.server_service_pb2 import SERVER_STATE_FAILED, GetServerInfoResponse
from treadle.trainer.config.schema import Config
from treadle.trainer.launch.process import Process, ProcessError
from treadle.trainer.launch.supervision import Restarts

__all__ = ["PooledServer", "Rotation", "Routes", "ServerRow"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PooledServer:
    """One running server.

    Attributes:
        name: Name of the replica; the same after a restart.
        process: The program; None: someone else's.
        client: For control calls and weights.
        ended: Done when the server has ended, with what became of it.
        holds: The weight version that it had when it joined.
    """

    name: str
    address: str
    process: Process | None
    client: WeightSyncClient
    ended: "asyncio.Task[str]"
    holds: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Where requests may go.

    Attributes:
        serving: Addresses of the servers that take new sessions; all hold the present weights.
        draining: Addresses of those that keep the sessions they have.
        weight_version: Version of the present weights. No call may be sampled from older ones.
    """

    serving: tuple[str, ...]
    draining: tuple[str, ...] = ()
    weight_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRow:
    """One server as `treadle servers list` shows it.

    Attributes:
        address: host:port; empty where it is not known yet.
        state: starting, serving, draining or dead.
        version: Version of its weights; None: not known.
        cause: Why it is dead; empty otherwise.
    """

    name: str
    address: str
    state: str
    version: int | None
    sessions: int
    owner: str
    cause: str = ""


class Rotation:
    """The servers of a run, by name, and where requests may go.

    Args:
        publishes: Whether servers get weights from here; else they keep those that they have.
    """

    def __init__(self, config: Config, *, publishes: bool, first_version: int) -> None:
        self._config = config
        self._publishes = publishes
        self._weight_version = 0
        self._next_version = first_version  # that an update under way brings
        self._restarts = Restarts(config.rollout.max_restarts, "rollout.max_restarts")
        self._attached = {
            f"attached-{number}": address for number, address in enumerate(config.rollout.addresses)
        }
        self._given: dict[str, int] = {}  # attached server -> version that it had here last
        self._adding: dict[str, asyncio.Future[None]] = {}
        self._draining: set[str] = set()
        self._moved: set[str] = set()  # of the draining: they keep no session
        self._listeners: list[Callable[[Routes], None]] = []
        self._sessions_at: Callable[[str], int] | None = None
        self._generator: GrpcTokenGenerator | None = None
        self._rotation: dict[str, PooledServer] = {}
        self._dead: dict[str, str] = {}  # name -> cause
        self._starting: dict[str, asyncio.Task[PooledServer]] = {}
        self._news = asyncio.Event()  # a server ended or has started

    def on_change(self, listener: Callable[[Routes], None]) -> Callable[[], None]:
        """Calls a listener with the routes, now and after each change; returns what removes it.

        It is called on the pool's event loop and must not wait. A new address is in the routes only
        after its server has the present weights.
        """
        self._listeners.append(listener)
        listener(self.routes)
        return lambda: self._listeners.remove(listener)

    @property
    def routes(self) -> Routes:
        """Where requests may go now."""
        draining = [s for s in self.live if s.name in self._draining]
        return Routes(
            serving=tuple(s.address for s in self.live if s.name not in self._draining),
            draining=tuple(s.address for s in draining if s.name not in self._moved),
            weight_version=self._weight_version,
        )

    def _notify(self) -> None:
        if self._generator is not None:
            self._generator.require_weights(self._weight_version)
        for listener in self._listeners:
            listener(self.routes)

    @property
    def generator(self) -> GrpcTokenGenerator:
        """Samples on the servers of the rotation. Needs `connect`."""
        assert self._generator is not None, "the pool was not connected"
        return self._generator

    @property
    def weight_version(self) -> int:
        """The version that the servers of the rotation sample from; 0: the model directory's."""
        return self._weight_version

    @property
    def live(self) -> Sequence[PooledServer]:
        """The servers of the rotation, by name."""
        return [self._rotation[name] for name in sorted(self._rotation)]

    @property
    def clients(self) -> list[WeightSyncClient]:
        """The clients of the servers of the rotation, by name."""
        return [server.client for server in self.live]

    @property
    def dead(self) -> Collection[str]:
        """Names of the servers that are dead, noticed or not; they may be starting again."""
        ended = {name for name, server in self._rotation.items() if server.ended.done()}
        return self._dead.keys() | ended

    def take_metrics(self) -> dict[str, float]:
        """Returns the number of servers now, and of losses and restarts since the last call."""
        return {
            "servers/live": float(len(self._rotation)),
            "servers/draining": float(len(self._draining)),
            **self._restarts.take_metrics("servers"),
        }

    async def wait_until_all_ended(self) -> None:
        """Returns when no server of the rotation has a running process."""
        while running := [s.ended for s in self._rotation.values() if not s.ended.done()]:
            await asyncio.wait(running)

    async def wait_for_change(self) -> None:
        """Returns when `ensure_healthy` could replace a server or let one in.

        That is never while servers lend their memory to the policy, or if none is left that serves.
        """
        while not self._may_change():
            self._news.clear()
            await self._news.wait()

    def _may_change(self) -> bool:
        ended = [server.ended.done() for server in self._rotation.values()]
        if self._config.rollout.release_memory or all(ended):
            return False
        return any(ended) or any(task.done() for task in self._starting.values())

    def _end_told_by(self, client: WeightSyncClient, info: GetServerInfoResponse) -> str:
        """Returns why the server considers itself lost, or "" if it is serving."""
        if info.state == SERVER_STATE_FAILED:
            return "lost its engine"
        expected = {self._weight_version, self._next_version}
        in_sync = client.name in self._rotation and client.name in self._given
        if not self._publishes or not in_sync or info.weight_version in expected:
            return ""
        return (
            f"holds weight version {info.weight_version}, not {self._weight_version}: it was "
            "started again, or another run writes to it"
        )

    async def remove(self, name: str, cause: str) -> None:
        """Takes a server out of the rotation and ends its process. Idempotent.

        One that was added and never served is refused, and forgotten.
        """
        server = self._rotation.pop(name, None)
        if server is None:
            return
        if (adding := self._adding.pop(name, None)) is not None:
            self._attached.pop(name)
            if not adding.done():
                adding.set_exception(ProcessError(cause))
        elif name in self._draining:  # it was to leave
            self._forget(name)
        else:
            _log.warning("rollout server lost: %s", cause)
            self._dead[name] = cause
            self._restarts.num_lost += 1
        await self._end(server)
        self._notify()

    async def _remove_with_log(self, server: PooledServer, cause: str) -> None:
        if server.process is not None and not server.ended.done():
            where = f" on node {server.process.node}"
            cause = await with_log(server.process, cause, where=where)
        await self.remove(server.name, cause)

    def _forget(self, name: str) -> None:
        self._draining.discard(name)
        self._moved.discard(name)
        self._attached.pop(name, None)

    def drain(self, which: str, *, now: bool = False) -> int:
        """Gives a server no new session, and has it leave; returns its number of open sessions.

        It leaves at the next step after its last session has ended.

        Args:
            now: Its sessions move to other servers with their next request.

        Raises:
            ProcessError: there is none of this name, or no other server serves.
        """
        live = [s for s in self.live if not s.ended.done()]  # the others are started again
        servers = {s.name: s for s in live if which in (s.name, s.address)}
        if not servers:
            known = ", ".join(f"{s.name} ({s.address})" for s in live)
            raise ProcessError(f"{which} is no server of this run, which has {known}")
        ((name, server),) = servers.items()
        if not self._rotation.keys() - self._draining - {name}:
            raise ProcessError(
                f"{which} is the only server that takes new sessions: add another one first"
            )
        self._draining.add(name)
        self.generator.drain_replica(server.address)
        sessions = self._sessions(server)
        if now:
            self._moved.add(name)
        self._notify()
        return sessions

    def count_sessions_by(self, sessions_at: Callable[[str], int]) -> None:
        """Takes open sessions from elsewhere: loop workers open theirs at the run's router."""
        self._sessions_at = sessions_at

    def _sessions(self, server: PooledServer) -> int:
        if self._sessions_at is not None:
            return self._sessions_at(server.address)
        return 0 if self._generator is None else self._generator.sessions_at(server.address)

    def rows(self) -> list[ServerRow]:
        """Returns every server that the run has or waits for."""
        rows = [
            ServerRow(
                name=s.name,
                address=s.address,
                state="draining" if s.name in self._draining else "serving",
                version=self._weight_version,
                sessions=self._sessions(s),
                owner="run" if s.process is not None else "someone else",
            )
            for s in self.live
        ]
        for name in sorted((self._dead.keys() | self._starting.keys()) - self._rotation.keys()):
            starting = name in self._starting and name not in self._attached
            rows.append(
                ServerRow(
                    name=name,
                    address=self._attached.get(name, ""),
                    state="starting" if starting or name in self._adding else "dead",
                    version=None,
                    sessions=0,
                    owner="someone else" if name in self._attached else "run",
                    cause=self._dead.get(name, ""),
                )
            )
        return rows

    def _note_given(self) -> None:
        joined = self._attached.keys() & self._rotation.keys()
        self._given |= dict.fromkeys(joined, self._weight_version)

    async def _end(self, server: PooledServer) -> None:
        if self._generator is not None:
            await self._generator.remove_replica(server.address)
        server.ended.cancel()  # first: it calls a server of someone else
        await server.client.aclose()
        if server.process is not None:
            await server.process.stop()
