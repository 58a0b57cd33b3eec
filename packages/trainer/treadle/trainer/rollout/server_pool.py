"""The server pool: the rollout servers of a run, as processes and as one token generator.

Invariants, beside those of `rotation.py` and `server_starter.py`:

1. A server in the rotation was healthy when it was last checked, and holds every weight version
   that was published since it joined.
2. The generator is connected once per run. It routes only to servers of the rotation, and to a
   restarted one only after that server has the present weights.
3. Servers join and leave the rotation in `ensure_healthy` and `sync_weights` only, while nobody
   else calls them; `wait_for_change` returns when there is something to do.

`restart` waits only where the run cannot continue: for the first server to start when none is
left, and for all where servers lend their memory, since a start during a loan would take it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence, Set
from typing import Any, ClassVar, Self

from treadle.agent_loop import SetupError, StickySession
from treadle.agent_loop.aio import concurrently
from treadle.agent_loop.rpc import GrpcTokenGenerator, Requirements, connect
from treadle.policy.weight_sync.errors import Outcome, WeightSyncError
from treadle.policy.weight_sync.publisher import PublishReport
from treadle.trainer.config.schema import Config
from treadle.trainer.rollout.rotation import PooledServer
from treadle.trainer.rollout.server_starter import Publish, ServerStarter

__all__ = ["NoServerLeftError", "ServerPool", "required_capabilities"]

_log = logging.getLogger(__name__)


class NoServerLeftError(RuntimeError):
    """No rollout server is left; the message lists how each ended."""


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
    if config.rollout.truncation is not None:
        required.add("sampling_mask")
    return frozenset(required)


class ServerPool(ServerStarter):
    """Keeps the servers of a run healthy and in sync, and ends them."""

    _EXIT_GRACE_S: ClassVar[float] = 4.0
    """How long after its connections break the end of a process may go unreported. Ray reports a
    dead node after about 2 s."""

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

    async def ensure_healthy(self) -> bool:
        """Removes dead servers, and lets in restarted ones with the present weights.

        If all servers die before they have these, they are started again.

        Returns:
            Whether a server died, was waited for or was restarted.

        Raises:
            NoServerLeftError: no server is left.
            WeightSyncError: no restarted server took the weights, and no other is left.
            SetupError: a restarted server does not fit.
        """
        disturbed = await self.check_health()
        await self._let_leave()
        while restarted := await self.restart():
            disturbed = True
            try:
                await self.resync(restarted)
            except WeightSyncError as error:
                await self.check_health(after_failure=True)
                if error.outcome is Outcome.FATAL or self._rotation:
                    raise
            else:
                break
        return disturbed

    async def replace_while(self, starting: Coroutine[Any, Any, None]) -> None:
        """Awaits a start that needs a server, and replaces the servers that end meanwhile.

        Raises:
            NoServerLeftError: no server is left, and none may be started.
        """
        started = asyncio.create_task(starting, name="start that needs a server")
        try:
            while not started.done():
                self._news.clear()
                await self.ensure_healthy()
                news = asyncio.create_task(self._news.wait(), name="news of servers")
                await asyncio.wait({started, news}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
            started.result()
        finally:
            started.cancel()
            await asyncio.wait({started})

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

    async def _ask_how_it_is(self, server: PooledServer) -> str | None:
        """Returns what became of a server, empty if it serves; None if it gives no answer."""
        try:
            info = await server.client.info()
        except WeightSyncError:
            return None
        return self._end_told_by(server.client, info)

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

    async def _remove_ended(self, server: PooledServer, end: str) -> None:
        await self._remove_with_log(server, f"{server.name} ({server.address}) {end}")

    async def _remove_refusing(self, failed: Mapping[str, str]) -> None:
        """Removes the servers that did not take an update, by name with the cause."""
        for name, cause in failed.items():
            if (server := self._rotation.get(name)) is not None:
                await self._remove_with_log(server, cause)

    async def _let_leave(self) -> None:
        """Ends the draining servers that have no session left, or whose sessions move."""
        for name in sorted(self._draining & self._rotation.keys()):
            server = self._rotation[name]
            if name in self._moved or not self._sessions(server):
                _log.warning("%s (%s) was drained and leaves the run", name, server.address)
                await self.remove(name, "was drained")

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
                f"no rollout server is left, {self._restarts}:\n" + "\n".join(self._dead.values())
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

    async def _resync_attached(self, server: PooledServer) -> None:
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

    async def _route_to_new(self) -> None:
        """Adds servers of the rotation to the generator if it does not have them yet."""
        if self._generator is not None:
            servers = [s for s in self.live if s.name not in self._draining]
            await concurrently(self._route_to(self._generator, server) for server in servers)
        self._note_given()
        for name in self._adding.keys() & self._rotation.keys():
            adding = self._adding.pop(name)
            if not adding.done():
                adding.set_result(None)
        self._notify()

    async def _route_to(self, generator: GrpcTokenGenerator, server: PooledServer) -> None:
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


def _succeeded(task: "asyncio.Task[PooledServer]") -> bool:
    return not task.cancelled() and task.exception() is None
