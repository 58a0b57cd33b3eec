"""The server pool: the rollout servers of a run, as processes and as one token generator.

Invariants:

1. A server in the rotation was healthy when it was last checked, and holds every weight version
   that was published since it joined.
2. The generator is connected once per run. It routes only to servers of the rotation, and to a
   restarted one only after that server has the present weights.
3. A server that dies leaves the rotation. A background task restarts it, as often as
   `rollout.max_restarts` allows, while the others continue: a real engine takes minutes to start.
   It begins when the process ends, before a call of the pool takes the dead server out of the
   rotation: while the policy trains there may be none for minutes. A server that is killed before
   it first served is started again within the same limit; one that exits by itself then has
   refused its settings, and ends the run.
4. A server that someone else started (`rollout.addresses`, `add`) is not ours to end. If
   it dies, or says that it holds other weights, it leaves the rotation and is asked again until it
   is back. What is wrong with it alone costs that server, not the run.
5. No call samples from weights that are older than those that all servers have: one that was
   started again refuses it, before anybody has noticed (`Routes.weight_version`).
6. Servers join and leave the rotation in `ensure_healthy` and `sync_weights` only, while nobody
   else calls them; `wait_for_change` says when there is something to do. Listeners (`on_change`)
   are told after each change of the routes.

`restart` waits only where the run cannot continue: for the first server to start when none is
left, and for all where servers lend their memory, since a start during a loan would take it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Self

from treadle.agent_loop import SetupError, StickySession
from treadle.agent_loop.aio import concurrently
from treadle.agent_loop.rpc import ChannelSecurity, GrpcTokenGenerator, Requirements, connect
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.errors import Outcome, WeightSyncError
from treadle.policy.weight_sync.publisher import PublishReport
from treadle.rollout.v1.server_service_pb2 import SERVER_STATE_FAILED, GetServerInfoResponse
from treadle.trainer.config.schema import Config
from treadle.trainer.config.topology import make_topology
from treadle.trainer.launch.process import Launcher, LostProcessError, Process, ProcessError
from treadle.trainer.rollout.server_process import server_spec
from treadle.trainer.rollout.server_security import server_security

__all__ = [
    "NoServerLeftError",
    "Publish",
    "Routes",
    "Server",
    "ServerPool",
    "ServerRow",
    "required_capabilities",
]

_log = logging.getLogger(__name__)

Publish = Callable[[int, Sequence[WeightSyncClient]], Awaitable[PublishReport]]
"""Gives the policy's present weights to servers, under a version: `WeightPublisher.publish`."""


class NoServerLeftError(RuntimeError):
    """No rollout server is left; the message says how each ended."""


@dataclass(frozen=True, slots=True)
class Server:
    """One running server.

    Attributes:
        name: Of the replica; the same after a restart.
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
        weight_version: Of the present weights. No call may be sampled from older ones.
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
        version: Of its weights; None: not known.
        cause: Why it is dead; empty otherwise.
    """

    name: str
    address: str
    state: str
    version: int | None
    sessions: int
    owner: str
    cause: str = ""


def required_capabilities(config: Config) -> frozenset[str]:
    """Returns what the servers of a run must be able to do, named as in the contract."""
    required = {"sampled_logprobs", f"{config.sync.transport.kind}_transport"}
    if config.sync.updates_in_place:
        required.add("in_place_update")
    if config.sync.in_flight == "continue":
        required.add("in_flight_continue")
    if config.rollout.release_memory:
        required.add("release_memory")
    if config.policy.moe.routing_replay:
        required.add("routed_experts")
    return frozenset(required)


class ServerPool:
    """Starts the servers of a run, keeps them healthy and in sync, and ends them."""

    _EXIT_GRACE_S: ClassVar[float] = 4.0
    """How long after its connections break the end of a process may take to be known. Ray tells of
    a node that died after about 2 s."""
    _ASK_AGAIN_S: ClassVar[float] = 1.0
    _ADD_S: ClassVar[float] = 10.0
    """How long a server that is added may take to answer; it runs already."""

    def __init__(
        self,
        launcher: Launcher,
        config: Config,
        *,
        publish: Publish | None = None,
        weights_directory: Path | None = None,
        traces: Path | None = None,
        first_version: int = 0,
    ) -> None:
        """Starts nothing yet.

        Args:
            publish: Gives the policy's weights to servers. None: they keep those of the model
                directory, and `sync_weights` is not called.
            weights_directory: Where the files of the file transport are; None: there are none.
            traces: Directory of the servers' spans, a file per server; None: they record none.
            first_version: Of the weights that the run will give its servers first; 0: of the model
                directory.
        """
        self._launcher = launcher
        self._config = config
        self._publish = publish
        self._weights_directory = weights_directory
        self._traces = traces
        topology = make_topology(config.launch, config.policy, config.rollout)
        servers = () if topology is None else topology.servers
        self._devices = {f"rollout-{number}": devices for number, devices in enumerate(servers)}
        self._weight_version = 0
        self._next_version = first_version  # that an update under way brings
        self._requirements: Requirements | None = None
        self._attached = {
            f"attached-{number}": address for number, address in enumerate(config.rollout.addresses)
        }
        self._num_attached = len(self._attached)
        self._given: dict[str, int] = {}  # attached server -> version that it had here last
        self._adding: dict[str, asyncio.Future[None]] = {}
        self._draining: set[str] = set()
        self._moved: set[str] = set()  # of the draining: they keep no session
        self._listeners: list[Callable[[Routes], None]] = []
        self._sessions_at: Callable[[str], int] | None = None
        self._generator: GrpcTokenGenerator | None = None
        self._connection = contextlib.AsyncExitStack()
        self._rotation: dict[str, Server] = {}
        self._dead: dict[str, str] = {}  # name -> cause
        self._starting: dict[str, asyncio.Task[Server]] = {}
        self._news = asyncio.Event()  # a server ended or has started
        self._incarnations: dict[str, int] = {}
        self._num_restarts = 0
        self._num_lost = 0  # both since `take_metrics`
        self._num_restarted = 0

    async def __aenter__(self) -> Self:
        """Starts all servers at once, and reaches those of `rollout.addresses`.

        Raises:
            LostProcessError: one was killed before it served, and no restart is left.
            ProcessError: one did not start, or did not answer.
        """
        names = [f"rollout-{number}" for number in range(self._config.rollout.num_replicas)]
        names += self._attached
        started = await concurrently(self._start_first(name) for name in names)
        self._rotation = {server.name: server for server in started}
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Closes the generator and ends all servers of the run."""
        servers = self.live
        self._rotation = {}  # first: none of them is started again
        for waiting in self._adding.values():
            waiting.cancel()
        await self._connection.aclose()
        self._generator = None
        for task in self._starting.values():
            task.cancel()
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        started = [task.result() for task in self._starting.values() if _succeeded(task)]
        self._starting = {}
        await asyncio.gather(*(self._end(server) for server in (*servers, *started)))

    async def connect(self, requirements: Requirements) -> None:
        """Connects the generator to all servers, for the rest of the run.

        A server that has died since it started is replaced first; one that stands still is waited
        for.

        Raises:
            SetupError: a server does not answer, or its tokenizer, vocabulary, context or
                capabilities do not fit.
            NoServerLeftError: no server is left, and none may be started.
        """
        self._requirements = requirements
        while self._generator is None:
            try:
                self._generator = await self._connection.enter_async_context(
                    connect(
                        [server.address for server in self.live],
                        requirements=requirements,
                        security=self._security,
                        policy=StickySession(cache_tokens=self._config.rollout.cache_tokens),
                    )
                )
            except SetupError:
                if not await self.check_health(after_failure=True, of_all=True):
                    raise
                await self.restart()
        self._note_given()

    def on_change(self, listener: Callable[[Routes], None]) -> Callable[[], None]:
        """Tells a listener the routes, now and after each change; returns what ends that.

        It is called on the pool's event loop and must not wait. A new address is told only after
        its server has the present weights.
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
    def live(self) -> Sequence[Server]:
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
        taken = {
            "servers/live": float(len(self._rotation)),
            "servers/draining": float(len(self._draining)),
            "servers/lost": float(self._num_lost),
            "servers/restarted": float(self._num_restarted),
        }
        self._num_lost = self._num_restarted = 0
        return taken

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

    async def ensure_healthy(self) -> bool:
        """Removes dead servers, and lets in restarted ones with the present weights.

        Returns:
            Whether a server died, was waited for or was restarted.

        Raises:
            NoServerLeftError: no server is left.
            WeightSyncError: no restarted server took the weights, and no other is left.
            SetupError: a restarted server does not fit.
        """
        disturbed = await self.check_health()
        await self._let_leave()
        restarted = await self.restart()
        if restarted:
            await self.resync(restarted)
        return disturbed or bool(restarted)

    async def check_health(self, *, after_failure: bool = False, of_all: bool = False) -> bool:
        """Removes the servers whose process ended or whose engine failed.

        If no server answers, it waits until one does. Those that gave no answer for
        `rollout.unresponsive_s` are dead, and are removed.

        Args:
            after_failure: A call to a server has just failed. Its connection breaks a moment
                before its process ends, so the processes get that moment.
            of_all: Every server is needed, so each that gives no answer is waited for.

        Returns:
            Whether a server was removed or waited for, so that calls that failed may succeed now.
        """
        if after_failure and self._rotation:
            ends = [server.ended for server in self.live]
            await asyncio.wait(ends, timeout=self._EXIT_GRACE_S)
        before = len(self._rotation)
        silent = await self._remove_dead()
        waits = bool(silent) and (of_all or silent == self._rotation.keys())
        if waits:
            await self._wait_for_answer(of_all=of_all)
        return waits or len(self._rotation) < before

    async def _remove_dead(self) -> Set[str]:
        """Removes servers that ended or lost their engine; returns which others are silent."""
        servers = self.live
        ends = await concurrently(self._ask_how_it_is(server) for server in servers)
        silent = set()
        for server, end in zip(servers, ends, strict=True):
            if server.ended.done():
                await self._remove_ended(server, server.ended.result())
            elif end is None:
                silent.add(server.name)
            elif end:
                await self._remove_ended(server, end)
        return silent

    async def _ask_how_it_is(self, server: Server) -> str | None:
        """Returns what became of a server, empty if it serves; None if it gives no answer."""
        try:
            info = await server.client.info()
        except WeightSyncError:
            return None
        return self._end_told_by(server.client, info)

    def _end_told_by(self, client: WeightSyncClient, info: GetServerInfoResponse) -> str:
        """Returns what became of a server by its own word; empty if it serves."""
        if info.state == SERVER_STATE_FAILED:
            return "lost its engine"
        expected = {self._weight_version, self._next_version}
        in_sync = client.name in self._rotation and client.name in self._given
        if self._publish is None or not in_sync or info.weight_version in expected:
            return ""
        return (
            f"holds weight version {info.weight_version}, not {self._weight_version}: it was "
            "started again, or another run writes to it"
        )

    async def _wait_for_answer(self, *, of_all: bool) -> None:
        """Waits until a server answers, or all do; removes those without an answer for too long."""
        limit_s = self._config.rollout.unresponsive_s
        if of_all:
            _log.warning("a rollout server does not answer; waiting up to %g s for it", limit_s)
        else:
            _log.warning("no rollout server answers; waiting up to %g s for one", limit_s)
        clock = asyncio.get_running_loop().time
        end = clock() + limit_s
        while self._rotation:
            ends = [server.ended for server in self.live]
            await asyncio.wait(ends, timeout=self._ASK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
            silent = await self._remove_dead()
            if not silent or (not of_all and silent != self._rotation.keys()):
                if self._rotation:
                    _log.warning("a rollout server answers again")
                return
            if clock() >= end:
                for name in silent:
                    cause = f"gave no answer for {limit_s:g} s (rollout.unresponsive_s)"
                    await self._remove_ended(self._rotation[name], cause)
                return

    async def _remove_ended(self, server: Server, end: str) -> None:
        await self._remove_with_log(server, f"{server.name} ({server.address}) {end}")

    async def _remove_with_log(self, server: Server, cause: str) -> None:
        if server.process is not None and not server.ended.done():
            tail = await server.process.log_tail(10)
            cause += f"; its log on node {server.process.node} ends with:\n{tail}"
        await self.remove(server.name, cause)

    async def _remove_refusing(self, failed: Mapping[str, str]) -> None:
        """Removes the servers that did not take an update, by name with the cause."""
        for name, cause in failed.items():
            if (server := self._rotation.get(name)) is not None:
                await self._remove_with_log(server, cause)

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
            self._num_lost += 1
        await self._end(server)
        self._notify()

    def _forget(self, name: str) -> None:
        self._draining.discard(name)
        self._moved.discard(name)
        self._attached.pop(name, None)

    async def add(self, address: str) -> "asyncio.Future[None]":
        """Lets in a server that someone else started, once it has answered and fits.

        Returns:
            Done when it serves; with a `ProcessError` if it does not take the weights.

        Raises:
            ProcessError: it does not answer or does not fit, or the run lends its servers' memory
                to the policy.
        """
        if self._config.rollout.release_memory:
            raise ProcessError(
                f"{address}: this run has rollout.release_memory=true, so its servers share the "
                "policy's devices, and those of someone else do not: no server can be added"
            )
        if address in (s.address for s in self.live) or address in self._attached.values():
            raise ProcessError(f"{address} is a server of this run already")
        name = f"attached-{self._num_attached}"
        self._num_attached += 1
        self._attached[name] = address
        try:
            await self._attach(name, address, wait_s=self._ADD_S, check_only=True)
        except BaseException:
            del self._attached[name]
            raise
        serves: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._adding[name] = serves
        self._begin_start(name)
        return serves

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

    async def _let_leave(self) -> None:
        """Ends the draining servers that have no session left, or whose sessions move."""
        for name in sorted(self._draining & self._rotation.keys()):
            server = self._rotation[name]
            if name in self._moved or not self._sessions(server):
                _log.warning("%s (%s) was drained and leaves the run", name, server.address)
                await self.remove(name, "was drained")

    def count_sessions_by(self, sessions_at: Callable[[str], int]) -> None:
        """Takes open sessions from elsewhere: loop workers open theirs at the run's router."""
        self._sessions_at = sessions_at

    def _sessions(self, server: Server) -> int:
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

    async def restart(self, *, attached: bool = True) -> Sequence[str]:
        """Starts dead servers again while restarts are left, and lets in those that have started.

        They hold the weights of the model directory: `resync` or `sync_weights` must follow.

        Args:
            attached: Whether servers of someone else are let in too.

        Returns:
            The names of the servers that joined the rotation.

        Raises:
            NoServerLeftError: no server is left, and none may be started.
        """
        self._start_dead()
        joined = await self._let_in(attached=attached)
        while self._starting and (self._config.rollout.release_memory or not self._rotation):
            await asyncio.wait(self._starting.values(), return_when=asyncio.FIRST_COMPLETED)
            joined += await self._let_in(attached=attached)
            self._start_dead(attached=False)  # one that did not answer in time is not asked again
        if not self._rotation:
            raise NoServerLeftError(
                f"no rollout server is left, after {self._num_restarts} restarts "
                f"(rollout.max_restarts={self._config.rollout.max_restarts}):\n"
                + "\n".join(self._dead.values())
            )
        if own := [name for name in joined if name not in self._attached]:
            _log.warning("started again: %s", ", ".join(own))
        if others := [name for name in joined if name in self._attached]:
            _log.warning("joined the run: %s", ", ".join(others))
        return joined

    async def resync(self, names: Sequence[str]) -> None:
        """Gives the present weights to restarted servers, and routes to them from then on.

        Raises:
            WeightSyncError: none of them took the weights, and no other server is left.
            SetupError: one of them does not fit.
        """
        joining = [server for server in self.live if server.name in names]
        # Servers load version 0 from the model directory.
        behind = [server for server in joining if server.holds != self._weight_version]
        # A server of someone else is given them alone: if it does not fit, it alone is refused.
        for server in behind:
            if server.process is None:
                await self._resync_attached(server)
        clients = [server.client for server in behind if server.process is not None]
        if clients:
            try:
                failed = (await self._publisher(self._weight_version, clients)).failed
            except WeightSyncError as error:
                if error.outcome is Outcome.FATAL or len(clients) == len(self._rotation):
                    raise
                failed = {client.name: str(error) for client in clients}
            await self._remove_refusing(failed)
        await self._route_to_new()

    async def _resync_attached(self, server: Server) -> None:
        try:
            await self._publisher(self._weight_version, [server.client])
        except WeightSyncError as error:
            if len(self._rotation) == 1:
                raise
            await self.remove(server.name, str(error))

    async def sync_weights(
        self, version: int, *, prepare: Callable[[], Awaitable[None]] | None = None
    ) -> PublishReport:
        """Gives the policy's weights to all servers, as `version`.

        If all servers die, before or during the update, they are restarted and updated again.

        Args:
            prepare: Called before each attempt, when the servers that take part are known.

        Raises:
            NoServerLeftError: no server is left, and none may be started.
            WeightSyncError: no server took the weights, and some of them live.
            SetupError: a restarted server does not fit.
        """
        report = None
        while report is None:
            await self.check_health()
            await self._let_leave()
            # Servers that the run started again get `version` with the others. Those of someone
            # else join later: one that does not fit must not fail the update of all.
            await self.restart(attached=not self._rotation)
            if prepare is not None:
                await prepare()
            try:
                self._next_version = version
                report = await self._publisher(version, self.clients)
            except WeightSyncError as error:
                disturbed = await self.check_health(after_failure=True)
                if error.outcome is Outcome.FATAL or (self._rotation and not disturbed):
                    raise
        if report.failed:
            await self.check_health(after_failure=True)  # the end of a process is the better cause
        await self._remove_refusing(report.failed)
        self._weight_version = version
        await self._route_to_new()
        return report

    @property
    def _publisher(self) -> Publish:
        assert self._publish is not None, "the pool was made without weights to publish"
        return self._publish

    def _start_dead(self, *, attached: bool = True) -> None:
        for name in self._dead:
            if name in self._starting:
                continue
            if name in self._attached:
                if not attached:
                    continue
            elif not self._take_restart():
                continue
            self._begin_start(name)

    def _take_restart(self) -> bool:
        """Counts a restart; returns whether one was left."""
        left = self._num_restarts < self._config.rollout.max_restarts
        self._num_restarts += left
        return left

    def _begin_start(self, name: str, after: Process | None = None) -> None:
        starting = asyncio.create_task(self._start(name, after), name=f"start {name}")
        starting.add_done_callback(lambda _: self._news.set())
        self._starting[name] = starting

    def _on_end(self, name: str, ended: "asyncio.Task[str]") -> None:
        """Starts a server of the run again, before anybody has noticed that it ended."""
        self._news.set()
        server = self._rotation.get(name)
        if server is None or server.ended is not ended or server.process is None:
            return
        if self._config.rollout.release_memory or name in self._draining:
            return  # a start during a loan would take the memory; what was drained leaves
        if self._take_restart():
            self._begin_start(name, server.process)

    async def _let_in(self, *, attached: bool) -> list[str]:
        """Puts the servers that have started into the rotation; returns their names."""
        joined = []
        for name, task in list(self._starting.items()):
            # What ended a moment ago is removed with its cause first, also if it serves again.
            if not task.done() or name in self._rotation:
                continue
            if name in self._attached and not attached:
                continue
            del self._starting[name]
            try:
                self._rotation[name] = await task
            except ProcessError as error:
                if (adding := self._adding.pop(name, None)) is not None:
                    self._attached.pop(name)
                    if not adding.done():
                        adding.set_exception(error)
                    continue
                if self._dead.get(name) != str(error):
                    _log.warning("rollout server did not start again: %s", error)
                self._dead[name] = str(error)
                continue
            self._num_restarted += self._dead.pop(name, None) is not None
            joined.append(name)
        return joined

    async def _start_first(self, name: str) -> Server:
        """Starts a server, and again if it is killed before it serves.

        Raises:
            LostProcessError: It was killed, and no restart is left.
            ProcessError: It did not start, or did not answer.
        """
        lost = False
        while True:
            try:
                server = await self._start(name)
            except LostProcessError as error:
                self._num_lost += 1
                if not self._take_restart():
                    raise LostProcessError(
                        f"after {self._num_restarts} restarts "
                        f"(rollout.max_restarts={self._config.rollout.max_restarts}), {error}"
                    ) from None
                lost = True
                _log.warning("rollout server lost: %s\nit is started again", error)
            else:
                if lost:
                    self._num_restarted += 1
                    _log.warning("started again: %s", name)
                return server

    async def _start(self, name: str, after: Process | None = None) -> Server:
        """Starts a server, or reaches one of someone else.

        Args:
            after: The process that was it and has ended. Others that it had started may live, and
                hold the memory of its devices.

        Raises:
            LostProcessError: It was killed before it served.
            ProcessError: It did not start, or did not answer.
        """
        if after is not None:
            await after.stop()
        if (given := self._attached.get(name)) is not None:
            server = await self._attach(name, given, wait_s=self._config.rollout.start_deadline_s)
            assert server is not None
            return server
        incarnation = self._incarnations.get(name, 0)
        self._incarnations[name] = incarnation + 1
        process = await self._launcher.start(
            server_spec(
                self._config,
                name if not incarnation else f"{name}-restart-{incarnation}",
                weights_directory=self._weights_directory,
                traces=self._traces,
                devices=self._devices.get(name),
            )
        )
        try:
            address = await process.ready(self._config.rollout.start_deadline_s)
        except ProcessError:
            await process.stop()  # a server that is merely late would hold its memory
            raise
        ended = asyncio.create_task(_end_of(process), name=f"end of {name}")
        ended.add_done_callback(partial(self._on_end, name))
        return Server(name, address, process, self._open_client(name, address), ended)

    async def _attach(
        self, name: str, address: str, *, wait_s: float, check_only: bool = False
    ) -> Server | None:
        """Waits until a server of someone else answers; returns None with `check_only`.

        Raises:
            ProcessError: It does not answer in time, refuses, does not fit, or holds newer weights.
        """
        try:
            client = self._open_client(name, address)
        except SetupError as error:
            raise ProcessError(f"{name} ({address}): {error}") from None
        try:
            holds = await self._ask(client, wait_s)
            self._check_version(name, address, holds)
            if self._requirements is not None:
                await self._check_fits(address, self._requirements)
            if check_only:
                await client.aclose()
                return None
        except BaseException:
            await client.aclose()
            raise
        if holds != self._given.get(name):
            self._given.pop(name, None)  # it was started again, and gets the present weights first
        ended = asyncio.create_task(self._watch(client), name=f"end of {name}")
        ended.add_done_callback(lambda _: self._news.set())
        return Server(name, address, None, client, ended, holds)

    async def _ask(self, client: WeightSyncClient, wait_s: float) -> int:
        """Returns the weight version of a server once it answers."""
        clock = asyncio.get_running_loop().time
        end = clock() + wait_s
        while True:
            try:
                return int((await client.info()).weight_version)
            except WeightSyncError as error:
                if error.outcome is Outcome.FATAL:
                    raise ProcessError(
                        f"{error}. Start the server with the token of this run "
                        "(rollout.token_file, else the run directory's server_token)"
                    ) from None
                if clock() >= end:
                    raise ProcessError(
                        f"{client.name} ({client.address}) gave no answer for {wait_s:g} s: start "
                        f"it, or correct the address. The last failure: {error}"
                    ) from None
            await asyncio.sleep(self._ASK_AGAIN_S)

    def _check_version(self, name: str, address: str, holds: int) -> None:
        ours = self._weight_version or self._next_version
        same = holds == ours and (not ours or self._given.get(name) == ours)
        if self._publish is not None and holds >= ours and not same:
            raise ProcessError(
                f"{name} ({address}) holds weight version {holds}, and this run's is {ours}: a "
                "server takes newer weights only. Start it again, with the run's model"
            )

    async def _check_fits(self, address: str, requirements: Requirements) -> None:
        try:
            async with connect([address], requirements=requirements, security=self._security):
                pass
        except SetupError as error:
            raise ProcessError(str(error)) from None

    async def _watch(self, client: WeightSyncClient) -> str:
        """Returns what became of a server whose process is not ours to watch."""
        limit_s, clock = self._config.rollout.unresponsive_s, asyncio.get_running_loop().time
        answered = clock()
        while True:
            await asyncio.sleep(self._ASK_AGAIN_S)
            try:
                info = await client.info()
            except WeightSyncError:
                if clock() - answered > limit_s:
                    return f"gave no answer for {limit_s:g} s (rollout.unresponsive_s)"
                continue
            answered = clock()
            if end := self._end_told_by(client, info):
                if self._generator is not None:  # before anybody has noticed
                    await self._generator.remove_replica(client.address)
                return end

    def _open_client(self, name: str, address: str) -> WeightSyncClient:
        return WeightSyncClient(
            name,
            address,
            control_deadline_s=self._config.sync.control_deadline_s,
            commit_deadline_s=self._config.sync.commit_deadline_s,
            security=self._security,
        )

    @property
    def _security(self) -> ChannelSecurity:
        return server_security(self._config.rollout).read()

    async def _route_to_new(self) -> None:
        """Adds the servers of the rotation that the generator does not know yet."""
        if self._generator is not None:
            servers = [s for s in self.live if s.name not in self._draining]
            await concurrently(self._route_to(self._generator, server) for server in servers)
        self._note_given()
        for name in self._adding.keys() & self._rotation.keys():
            adding = self._adding.pop(name)
            if not adding.done():
                adding.set_result(None)
        self._notify()

    def _note_given(self) -> None:
        joined = self._attached.keys() & self._rotation.keys()
        self._given |= dict.fromkeys(joined, self._weight_version)

    async def _route_to(self, generator: GrpcTokenGenerator, server: Server) -> None:
        """Adds one server; one that ends meanwhile is left to the next `check_health`.

        Raises:
            SetupError: it lives and does not fit.
        """
        adding = asyncio.create_task(generator.add_replica(server.address))
        try:
            await asyncio.wait({adding, server.ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            adding.cancel()
            await asyncio.wait({adding})
        error = None if adding.cancelled() else adding.exception()
        if isinstance(error, SetupError):
            await asyncio.wait({server.ended}, timeout=self._EXIT_GRACE_S)
        if error is None or server.ended.done():
            return
        if server.process is None and len(self._rotation) > 1:
            await self.remove(server.name, str(error))
        else:
            raise error

    async def _end(self, server: Server) -> None:
        if self._generator is not None:
            await self._generator.remove_replica(server.address)
        server.ended.cancel()  # first: it calls a server of someone else
        await server.client.aclose()
        if server.process is not None:
            await server.process.stop()


async def _end_of(process: Process) -> str:
    end = process.describe_end(await process.wait())
    return f"{end}; its log ends with:\n{await process.log_tail(10)}"


def _succeeded(task: "asyncio.Task[Server]") -> bool:
    return not task.cancelled() and task.exception() is None
