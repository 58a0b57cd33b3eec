"""The owner of the routing service (`treadle.agent_loop.rpc.router`) of a run's loop workers.

Invariants:

1. The router has the servers that the driver last sent (`set_replicas`). While it does not answer,
   workers continue with its last answers; a new session waits for it.
2. A router that ended, also before it served, or gave no answer for `rollout.unresponsive_s`, is
   started again at the same address, which the workers keep, with the present servers; as often as
   `agent.max_worker_restarts` allows in all. Sessions come back with their next call.

Who waits: one task here, for the end of the process, a change of the servers, or the next check.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from treadle.agent_loop import ReplicaUnavailableError
from treadle.agent_loop.rpc.router.admin import RouterAdmin
from treadle.policy.client.process import wait_until_ended, with_log
from treadle.trainer.config.schema import Config
from treadle.trainer.launch.process import Launcher, Process, ProcessError, ProcessSpec
from treadle.trainer.launch.supervision import Restarts
from treadle.trainer.rollout.server_security import server_security

if TYPE_CHECKING:
    from treadle.trainer.rollout.server_pool import ServerPool

__all__ = ["RouterLostError", "RunRouter"]

_log = logging.getLogger(__name__)
_VALID_FOR_S = 5.0
_EXIT_S = 2.0
_KILL_S = 0.1


class RouterLostError(ProcessError):
    """The routing service is gone, and may not be started again."""


class RunRouter:
    """Starts the router, sends it the list of servers, and replaces it when it dies.

    Args:
        on_lost: Called when the router is gone for good.
    """

    _LOOK_S: ClassVar[float] = 5.0
    _CALL_S: ClassVar[float] = 5.0
    _SHARES_S: ClassVar[float] = 2.0
    """A router that stands still must not hold up the end of a step for longer."""

    def __init__(
        self, launcher: Launcher, config: Config, *, on_lost: Callable[[Exception], None]
    ) -> None:
        self._launcher = launcher
        self._config = config
        self._on_lost = on_lost
        self._replicas: tuple[str, ...] = ()
        self._draining: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        self._sessions: Mapping[str, int] = {}
        self._occupied_s: Mapping[str, float] = {}
        self._process: Process | None = None
        self._address = ""
        self._watching: asyncio.Task[None] | None = None
        self._admin: RouterAdmin | None = None
        self._restarts = Restarts(config.agent.max_worker_restarts, "agent.max_worker_restarts")

    async def start(self, replicas: Sequence[str]) -> None:
        """Starts the router with these servers, and again if it ends before it serves.

        Raises:
            RouterLostError: It ended, and may not be started again.
            ProcessError: It cannot be run, or does not serve within `launch.start_deadline_s`.
        """
        self._replicas = tuple(replicas)
        address = "{host}:0"
        try:
            await self._start(address)
        except ProcessError as error:
            if self._process is None or await wait_until_ended(self._process, _EXIT_S) is None:
                raise
            await self._start_again(address, str(error))
        self._admin = RouterAdmin(
            self._address, server_security(self._config.rollout).read(), timeout_s=self._CALL_S
        )
        self._watching = asyncio.create_task(self._watch(), name="watch the router")

    async def aclose(self) -> None:
        """Ends the router."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        if self._admin is not None:
            await self._admin.aclose()
        if self._process is not None:
            await self._process.stop()

    async def __aenter__(self) -> Self:
        """Starts nothing yet."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Ends the router."""
        await self.aclose()

    @property
    def address(self) -> str:
        """host:port; the same after a restart."""
        return self._address

    def set_replicas(self, serving: Sequence[str], draining: Sequence[str] = ()) -> None:
        """Sets the servers; they are sent to the router at once, and again until it answers.

        Args:
            serving: Addresses of servers that take new sessions.
            draining: Addresses of servers that only keep the sessions they have.
        """
        self._replicas, self._draining = (*serving, *draining), frozenset(draining)
        self._changed.set()

    def follow(self, servers: "ServerPool") -> None:
        """Sets the pool's servers from now on, and counts their sessions for it."""
        servers.on_change(lambda routes: self.set_replicas(routes.serving, routes.draining))
        servers.count_sessions_by(self.sessions_at)

    def sessions_at(self, address: str) -> int:
        """Returns how many sessions a server had at the router's last answer."""
        return self._sessions.get(address, 0)

    async def occupied_s(self) -> Mapping[str, float]:
        """Returns by address for how long servers have had open sessions, at any worker.

        As of the last answer, where the router gives none within 2 s.
        """
        assert self._admin is not None, "start comes first"
        try:
            async with asyncio.timeout(self._SHARES_S):
                self._occupied_s = await self._admin.occupied_s()
        except TimeoutError:
            limit_s = self._SHARES_S
            _log.warning("the router %s gave no answer for %g s", self._address, limit_s)
        except ReplicaUnavailableError as error:
            _log.warning("%s", error)
        return self._occupied_s

    async def tell(self) -> None:
        """Sends the servers to the router, and stores their sessions from its answer.

        Raises:
            ReplicaUnavailableError: It does not answer.
        """
        assert self._admin is not None, "start comes first"
        serving = [address for address in self._replicas if address not in self._draining]
        self._sessions = await self._admin.set_replicas(serving, sorted(self._draining))

    async def _watch(self) -> None:
        assert self._process is not None
        clock = asyncio.get_running_loop().time
        answered = clock()
        ended = asyncio.create_task(self._process.wait(), name="end of the router")
        try:
            while True:
                changed = asyncio.create_task(self._changed.wait(), name="change of servers")
                try:
                    waits: set[asyncio.Future[Any]] = {ended, changed}
                    await asyncio.wait(
                        waits, timeout=self._LOOK_S, return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    changed.cancel()
                self._changed.clear()
                if ended.done():
                    ended = await self._replace(self._process.describe_end(ended.result()))
                    answered = clock()
                    continue
                try:
                    await self.tell()
                    answered = clock()
                except ReplicaUnavailableError as error:
                    _log.warning("%s", error)
                    limit_s = self._config.rollout.unresponsive_s
                    if clock() - answered >= limit_s and not ended.done():
                        await self._process.stop(_KILL_S)
                        ended.cancel()
                        ended = await self._replace(
                            f"gave no answer for {limit_s:g} s (rollout.unresponsive_s)"
                        )
                        answered = clock()
        except RouterLostError as error:
            self._on_lost(error)
        finally:
            ended.cancel()

    async def _replace(self, cause: str) -> "asyncio.Task[int]":
        """Starts the router again; returns what waits for its end.

        Raises:
            RouterLostError: It may not be started again.
        """
        assert self._process is not None
        text = await with_log(self._process, f"the router ({self._address}) {cause}")
        await self._start_again(self._address, text)
        self._changed.set()  # it was not told which servers drain
        return asyncio.create_task(self._process.wait(), name="end of the router")

    async def _start_again(self, address: str, text: str) -> None:
        """Starts the router again, and again if it ends before it serves.

        Args:
            address: Where it is to listen.

        Raises:
            RouterLostError: It may not be started again.
        """
        assert self._process is not None
        while self._restarts.take():
            _log.warning("%s\nit is started again", text)
            try:
                await self._start(address)
            except ProcessError as error:
                text = str(error)
                await self._process.stop(_KILL_S)
                continue
            return
        raise RouterLostError(f"{self._restarts}, {text}")

    async def _start(self, address: str) -> None:
        number = self._restarts.used
        self._process = await self._launcher.start(
            ProcessSpec(
                name="router" if not number else f"router-restart-{number}",
                module="treadle.agent_loop.rpc.router",
                args=("--address", address, *self._arguments()),
                placement="driver",
            )
        )
        self._address = await self._process.ready(self._config.launch.start_deadline_s)

    def _arguments(self) -> list[str]:
        rollout = self._config.rollout
        arguments = [part for address in self._replicas for part in ("--replica", address)]
        if rollout.cache_tokens is not None:
            arguments += ["--cache_tokens", str(rollout.cache_tokens)]
        else:  # sessions count alike, however long they are: not every turn has to ask
            arguments += ["--valid_for_s", str(_VALID_FOR_S)]
        for option in ("tls_certificate", "tls_key", "token_file"):
            if (path := getattr(rollout, option)) is not None:
                arguments += [f"--{option}", str(path)]
        if getattr(self._config.launch, "allow_plaintext_on_network", False):
            arguments.append("--insecure_allow_plaintext_beyond_loopback")
        return arguments
