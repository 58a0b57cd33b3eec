"""The server pool: the rollout servers of a run, as processes and as one token generator.

Invariants:

1. A server in the rotation was healthy when it was last checked, and holds every weight version
   that was published since it joined.
2. The generator is connected once per run. It routes only to servers of the rotation, and to a
   restarted one only after that server has the present weights.
3. A server that dies leaves the rotation. A background task restarts it, as often as
   `rollout.max_restarts` allows, while the others continue: a real engine takes minutes to start.

`restart` waits only where the run cannot continue: for the first server to start when none is
left, and for all where servers lend their memory, since a start during a loan would take it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from treadle.agent_loop import SetupError, StickySession
from treadle.agent_loop.aio import concurrently
from treadle.agent_loop.rpc import ChannelSecurity, GrpcTokenGenerator, Requirements, connect
from treadle.trainer.config.schema import Config
from treadle.trainer.launch.local import describe_exit
from treadle.trainer.launch.process import Launcher, Process, ProcessError
from treadle.trainer.launch.topology import make_topology
from treadle.trainer.rollout.server_process import server_spec
from treadle.trainer.rollout.server_security import ServerSecurity
from treadle.trainer.weight_sync.client import ServerState, WeightSyncClient
from treadle.trainer.weight_sync.errors import Outcome, WeightSyncError
from treadle.trainer.weight_sync.publisher import PublishReport

__all__ = ["NoServerLeftError", "Publish", "Server", "ServerPool", "required_capabilities"]

_log = logging.getLogger(__name__)

Publish = Callable[[int, Sequence[WeightSyncClient]], Awaitable[PublishReport]]
"""Gives the policy's present weights to servers, under a version: `WeightPublisher.publish`."""


OnChange = Callable[[Sequence[str]], None]
"""Takes the addresses of all servers of the rotation that hold the present weights."""


class NoServerLeftError(RuntimeError):
    """No rollout server is left; the message says how each ended."""


@dataclass(frozen=True, slots=True)
class Server:
    """One running server.

    Attributes:
        name: Of the replica; the same after a restart.
        address: host:port.
        process: The program.
        client: For control calls and weights.
        ended: Done when the process has ended, with its exit status.
    """

    name: str
    address: str
    process: Process
    client: WeightSyncClient
    ended: "asyncio.Task[int]"


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

    _EXIT_GRACE_S: ClassVar[float] = 1.0
    """How long after its connections break a process may take to end."""
    _ASK_AGAIN_S: ClassVar[float] = 1.0

    def __init__(
        self,
        launcher: Launcher,
        config: Config,
        *,
        publish: Publish | None = None,
        weights_directory: Path | None = None,
        traces: Path | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            launcher: Starts the processes.
            config: Of the run.
            publish: Gives the policy's weights to servers. None: they keep those of the model
                directory, and `sync_weights` is not called.
            weights_directory: Where the files of the file transport are; None: there are none.
            traces: Directory of the servers' spans, a file per server; None: they record none.
        """
        self._launcher = launcher
        self._config = config
        self._publish = publish
        self._weights_directory = weights_directory
        self._traces = traces
        topology = make_topology(config)
        servers = () if topology is None else topology.servers
        self._devices = {f"rollout-{number}": devices for number, devices in enumerate(servers)}
        self._weight_version = 0
        self._on_change: OnChange | None = None
        self._generator: GrpcTokenGenerator | None = None
        self._connection = contextlib.AsyncExitStack()
        self._rotation: dict[str, Server] = {}
        self._dead: dict[str, str] = {}  # name -> cause
        self._starting: dict[str, asyncio.Task[Server]] = {}
        self._incarnations: dict[str, int] = {}
        self._num_restarts = 0
        self._num_lost = 0  # both since `take_metrics`
        self._num_restarted = 0

    async def __aenter__(self) -> Self:
        """Starts all servers at once.

        Raises:
            ProcessError: one did not start.
        """
        names = [f"rollout-{number}" for number in range(self._config.rollout.num_replicas)]
        started = await concurrently(self._start(name) for name in names)
        self._rotation = {server.name: server for server in started}
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Closes the generator and ends all servers."""
        await self._connection.aclose()
        self._generator = None
        for task in self._starting.values():
            task.cancel()
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        started = [task.result() for task in self._starting.values() if _succeeded(task)]
        self._starting = {}
        await asyncio.gather(*(self._end(server) for server in (*self.live, *started)))
        self._rotation = {}

    async def connect(self, requirements: Requirements) -> None:
        """Connects the generator to all servers, for the rest of the run.

        A server that has died since it started is replaced first; one that stands still is waited
        for.

        Raises:
            SetupError: a server does not answer, or its tokenizer, vocabulary, context or
                capabilities do not fit.
            NoServerLeftError: no server is left, and none may be started.
        """
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

    def notify(self, on_change: OnChange) -> None:
        """Calls `on_change` from now on, whenever servers leave or join; after `connect`."""
        self._on_change = on_change

    def _notify(self) -> None:
        if self._on_change is not None:
            # One that has just joined may not have the weights yet.
            routed = {server.address for server in self.generator.servers}
            self._on_change([s.address for s in self.live if s.address in routed])

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

    def take_metrics(self) -> dict[str, float]:
        """Returns the number of servers now, and of losses and restarts since the last call."""
        taken = {
            "servers/live": float(len(self._rotation)),
            "servers/lost": float(self._num_lost),
            "servers/restarted": float(self._num_restarted),
        }
        self._num_lost = self._num_restarted = 0
        return taken

    async def wait_until_all_ended(self) -> None:
        """Returns when no server of the rotation has a running process."""
        while running := [s.ended for s in self._rotation.values() if not s.ended.done()]:
            await asyncio.wait(running)

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
        states = await concurrently(server.client.state() for server in servers)
        silent = set()
        for server, state in zip(servers, states, strict=True):
            if server.ended.done():
                await self._bury(server, describe_exit(server.ended.result()))
            elif state is ServerState.FAILED:
                await self._bury(server, "lost its engine")
            elif state is ServerState.SILENT:
                silent.add(server.name)
        return silent

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
                    await self._bury(self._rotation[name], cause)
                return

    async def _bury(self, server: Server, end: str) -> None:
        tail = await server.process.log_tail(10)
        text = f"{server.name} ({server.address}) {end}; its log ends with:\n{tail}"
        await self.remove(server.name, text)

    async def remove(self, name: str, cause: str) -> None:
        """Takes a server out of the rotation and ends its process. Idempotent."""
        server = self._rotation.pop(name, None)
        if server is None:
            return
        _log.warning("rollout server lost: %s", cause)
        self._dead[name] = cause
        self._num_lost += 1
        self._notify()
        await self._end(server)

    async def restart(self) -> Sequence[str]:
        """Starts dead servers again while restarts are left, and lets in those that have started.

        They hold the weights of the model directory: `resync` or `sync_weights` must follow.

        Returns:
            The names of the servers that joined the rotation.

        Raises:
            NoServerLeftError: no server is left, and none may be started.
        """
        self._start_dead()
        joined = await self._let_in()
        while self._starting and (self._config.rollout.release_memory or not self._rotation):
            await asyncio.wait(self._starting.values(), return_when=asyncio.FIRST_COMPLETED)
            joined += await self._let_in()
            self._start_dead()
        if not self._rotation:
            raise NoServerLeftError(
                f"no rollout server is left, after {self._num_restarts} restarts "
                f"(rollout.max_restarts={self._config.rollout.max_restarts}):\n"
                + "\n".join(self._dead.values())
            )
        if joined:
            _log.warning("started again: %s", ", ".join(joined))
        return joined

    async def resync(self, names: Sequence[str]) -> None:
        """Gives the present weights to restarted servers, and routes to them from then on.

        Raises:
            WeightSyncError: none of them took the weights, and no other server is left.
            SetupError: one of them does not fit.
        """
        clients = [server.client for server in self.live if server.name in names]
        if self._weight_version:  # servers load version 0 from the model directory
            try:
                failed = (await self._publisher(self._weight_version, clients)).failed
            except WeightSyncError as error:
                if error.outcome is Outcome.FATAL or len(clients) == len(self._rotation):
                    raise
                failed = {client.name: str(error) for client in clients}
            for name, cause in failed.items():
                await self.remove(name, cause)
        await self._route_to_new()

    async def sync_weights(
        self, version: int, *, prepare: Callable[[], Awaitable[None]] | None = None
    ) -> PublishReport:
        """Gives the policy's weights to all servers, as `version`.

        If all servers die, before or during the update, they are restarted and updated again.

        Args:
            version: Of the weights.
            prepare: Called before each attempt, when the servers that take part are known.

        Raises:
            NoServerLeftError: no server is left, and none may be started.
            WeightSyncError: no server took the weights, and some of them live.
            SetupError: a restarted server does not fit.
        """
        report = None
        while report is None:
            await self.check_health()
            await self.restart()  # the restarted servers get `version` with the others
            if prepare is not None:
                await prepare()
            try:
                report = await self._publisher(version, self.clients)
            except WeightSyncError as error:
                disturbed = await self.check_health(after_failure=True)
                if error.outcome is Outcome.FATAL or (self._rotation and not disturbed):
                    raise
        if report.failed:
            await self.check_health(after_failure=True)  # the end of a process is the better cause
        for name, cause in report.failed.items():
            await self.remove(name, cause)
        self._weight_version = version
        await self._route_to_new()
        return report

    @property
    def _publisher(self) -> Publish:
        assert self._publish is not None, "the pool was made without weights to publish"
        return self._publish

    def _start_dead(self) -> None:
        for name in self._dead:
            if name in self._starting:
                continue
            if self._num_restarts >= self._config.rollout.max_restarts:
                break
            self._num_restarts += 1
            self._starting[name] = asyncio.create_task(self._start(name), name=f"start {name}")

    async def _let_in(self) -> list[str]:
        """Puts the servers that have started into the rotation; returns their names."""
        joined = []
        for name, task in list(self._starting.items()):
            if not task.done():
                continue
            del self._starting[name]
            try:
                self._rotation[name] = await task
            except ProcessError as error:
                self._dead[name] = str(error)
                _log.warning("rollout server did not start again: %s", error)
                continue
            del self._dead[name]
            self._num_restarted += 1
            joined.append(name)
        return joined

    async def _start(self, name: str) -> Server:
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
        ended = asyncio.create_task(process.wait(), name=f"end of {name}")
        return Server(name, address, process, self._open_client(name, address), ended)

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
        return ServerSecurity.of(self._config.rollout).read()

    async def _route_to_new(self) -> None:
        """Adds the servers of the rotation that the generator does not know yet."""
        if self._generator is not None:
            await concurrently(self._route_to(self._generator, server) for server in self.live)
            self._notify()

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
        if error is not None and not server.ended.done():
            raise error

    async def _end(self, server: Server) -> None:
        if self._generator is not None:
            await self._generator.remove_replica(server.address)
        await server.client.aclose()
        await server.process.stop()
        server.ended.cancel()


def _succeeded(task: "asyncio.Task[Server]") -> bool:
    return not task.cancelled() and task.exception() is None
