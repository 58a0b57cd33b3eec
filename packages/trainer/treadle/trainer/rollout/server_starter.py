"""Starts the servers of a run, again where that is allowed, and reaches those of someone else.

Invariants:

1. A server that dies is started again beside the run, as often as `rollout.max_restarts` allows: a
   real engine takes minutes to start. That begins when the process ends, before a call of the pool
   takes the dead server out of the rotation: while the policy trains there may be none for minutes.
2. A server that is killed before it first served is started again within the same limit; one that
   exits by itself then has refused its settings, and ends the run.
3. A server that someone else started (`rollout.addresses`, `add`) is never ended here. If it dies,
   or reports other weights, it is queried until it is back. A failure of that server alone loses
   the server, not the run.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from treadle.agent_loop import SetupError
from treadle.agent_loop.rpc import ChannelSecurity, Requirements, connect
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.errors import Outcome, WeightSyncError
from treadle.policy.weight_sync.publisher import PublishReport
from treadle.trainer.config.schema import Config
from treadle.trainer.config.topology import make_topology
from treadle.trainer.launch.process import Launcher, LostProcessError, Process, ProcessError
from treadle.trainer.launch.supervision import watch_end
from treadle.trainer.rollout.rotation import PooledServer, Rotation
from treadle.trainer.rollout.server_process import server_spec
from treadle.trainer.rollout.server_security import server_security

__all__ = ["Publish", "ServerStarter"]

_log = logging.getLogger(__name__)

Publish = Callable[[int, Sequence[WeightSyncClient]], Awaitable[PublishReport]]
"""Gives the policy's present weights to servers, under a version: `WeightPublisher.publish`."""


class ServerStarter(Rotation):
    """Starts the servers of a rotation, and reaches those of someone else.

    Args:
        publish: Gives the policy's weights to servers. None: they keep those of the model
            directory, and `sync_weights` is not called.
        weights_directory: Where the files of the file transport are; None: there are none.
        traces: Directory of the servers' spans, a file per server; None: they record none.
        first_version: Version of the weights that the run will give its servers first; 0: of the
            model directory.
    """

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
        super().__init__(config, publishes=publish is not None, first_version=first_version)
        self._launcher = launcher
        self._publish = publish
        self._weights_directory = weights_directory
        self._traces = traces
        topology = make_topology(config.launch, config.policy, config.rollout)
        servers = () if topology is None else topology.servers
        self._devices = {f"rollout-{number}": devices for number, devices in enumerate(servers)}
        self._requirements: Requirements | None = None
        self._num_attached = len(self._attached)
        self._incarnations: dict[str, int] = {}
        self._connection = contextlib.AsyncExitStack()

    def _start_dead(self, *, attached: bool = True) -> None:
        for name in self._dead:
            if name in self._starting:
                continue
            if name in self._attached:
                if not attached:
                    continue
            elif not self._restarts.take():
                continue
            self._begin_start(name)

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
        if self._restarts.take():
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
            self._restarts.num_restarted += self._dead.pop(name, None) is not None
            joined.append(name)
        return joined

    async def _start_first(self, name: str) -> PooledServer:
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
                self._restarts.num_lost += 1
                if not self._restarts.take():
                    raise LostProcessError(f"{self._restarts}, {error}") from None
                lost = True
                _log.warning("rollout server lost: %s\nit is started again", error)
            else:
                if lost:
                    self._restarts.num_restarted += 1
                    _log.warning("started again: %s", name)
                return server

    async def _start(self, name: str, after: Process | None = None) -> PooledServer:
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
        ended = watch_end(name, process, partial(self._on_end, name))
        return PooledServer(name, address, process, self._open_client(name, address), ended)

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

    async def _attach(
        self, name: str, address: str, *, wait_s: float, check_only: bool = False
    ) -> PooledServer | None:
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
        return PooledServer(name, address, None, client, ended, holds)

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
        if self._publishes and holds >= ours and not same:
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
