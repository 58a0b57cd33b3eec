"""The replicas: the rollout servers of a run, as processes and as addresses.

Invariant: a replica that is `live` was serving when it was last looked at, and has taken every
weight version that was published since it joined. A replica that dies leaves the rotation; it is
started again, as often as the configuration allows, by a task of its own, so that the others go on
meanwhile: a real engine takes minutes. `revive` lets in those that have started since, and its
caller follows with a publication of the present weights. Nobody routes to a replica before that.

`revive` waits where nothing could go on: for the first to start when none is live, and for all
where servers lend their memory, since a start in the middle of a loan would take it.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from treadle.agent_loop.aio import concurrently
from treadle.trainer.config.schema import RunConfig
from treadle.trainer.launch.local import describe_exit
from treadle.trainer.launch.process import Launcher, Process, ProcessError, poll_until_ended
from treadle.trainer.rollout.server_process import server_spec
from treadle.trainer.rollout.server_security import ServerSecurity
from treadle.trainer.weight_sync.client import WeightSyncClient

__all__ = ["Replica", "ReplicaSet", "ReplicasLostError"]

_END_S = 1.0
_log = logging.getLogger(__name__)


class ReplicasLostError(RuntimeError):
    """No rollout server is left; the message says how each ended."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One running server."""

    name: str
    address: str
    process: Process
    client: WeightSyncClient


class ReplicaSet:
    """Starts the servers, notices their deaths, and ends them."""

    def __init__(self, launcher: Launcher, config: RunConfig, *, weights_directory: Path) -> None:
        self._launcher = launcher
        self._config = config
        self._weights_directory = weights_directory
        self._live: dict[str, Replica] = {}
        self._dead: dict[str, str] = {}
        self._starting: dict[str, asyncio.Task[Replica]] = {}
        self._restarts = 0
        self._lost = 0  # both since `take_metrics`
        self._restarted = 0
        self._incarnations: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        """Starts all replicas at once.

        Raises:
            ProcessError: one did not start.
        """
        names = [f"rollout-{number}" for number in range(self._config.rollout.num_replicas)]
        started = await concurrently(self._start(name) for name in names)
        self._live = {replica.name: replica for replica in started}
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Ends all servers."""
        for task in self._starting.values():
            task.cancel()
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        started = [task.result() for task in self._starting.values() if _succeeded(task)]
        self._starting = {}
        await asyncio.gather(*(self._end(replica) for replica in (*self._live.values(), *started)))
        self._live = {}

    @property
    def live(self) -> Sequence[Replica]:
        """Those in the rotation, by name."""
        return [self._live[name] for name in sorted(self._live)]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of those in the rotation, by name."""
        return tuple(replica.address for replica in self.live)

    @property
    def clients(self) -> list[WeightSyncClient]:
        """Of those in the rotation, by name."""
        return [replica.client for replica in self.live]

    def take_metrics(self) -> dict[str, float]:
        """How many serve now, and how many were lost and came back since the last call."""
        taken = {
            "servers/live": float(len(self._live)),
            "servers/lost": float(self._lost),
            "servers/restarted": float(self._restarted),
        }
        self._lost = self._restarted = 0
        return taken

    async def look(self, *, after_failure: bool = False) -> Sequence[str]:
        """Takes servers that died, or whose engine did, out of the rotation; a sentence on each.

        Args:
            after_failure: Some did not do what they were asked. A connection ends a moment before
                its process does, so those that live are looked at for that long.
        """
        if after_failure:
            ends = (poll_until_ended(replica.process, _END_S) for replica in self.live)
            await asyncio.gather(*ends)
        said = []
        for replica in self.live:
            status = await replica.process.poll()
            if status is not None:
                end = describe_exit(status)
            elif await replica.client.engine_failed():
                end = "lost its engine"
            else:
                continue
            tail = await replica.process.log_tail(10)
            said.append(f"{replica.name} ({replica.address}) {end}")
            await self.drop(replica.name, f"{said[-1]}; its log ends with:\n{tail}")
        return said

    async def drop(self, name: str, cause: str) -> None:
        """Takes a server out of the rotation and ends its process."""
        _log.warning("rollout server lost: %s", cause)
        replica = self._live.pop(name)
        self._dead[name] = cause
        self._lost += 1
        await self._end(replica)

    async def revive(self) -> Sequence[str]:
        """Starts dead replicas again while restarts are left; the names of those that now serve.

        They hold the weights of the model directory, until the caller publishes.

        Raises:
            ReplicasLostError: none is left, and none may be started.
        """
        self._start_again()
        revived = await self._let_in()
        while self._starting and (self._config.rollout.release_memory or not self._live):
            await asyncio.wait(self._starting.values(), return_when=asyncio.FIRST_COMPLETED)
            revived += await self._let_in()
            self._start_again()
        if not self._live:
            raise ReplicasLostError(
                f"no rollout server is left, after {self._restarts} restarts "
                f"(rollout.max_restarts={self._config.rollout.max_restarts}):\n"
                + "\n".join(self._dead.values())
            )
        return revived

    def _start_again(self) -> None:
        for name in self._dead:
            if name in self._starting:
                continue
            if self._restarts >= self._config.rollout.max_restarts:
                break
            self._restarts += 1
            self._starting[name] = asyncio.create_task(self._start(name), name=f"start {name}")

    async def _let_in(self) -> list[str]:
        """Those whose start has ended, and well."""
        revived = []
        for name, task in list(self._starting.items()):
            if not task.done():
                continue
            del self._starting[name]
            try:
                self._live[name] = await task
            except ProcessError as error:
                self._dead[name] = str(error)
                _log.warning("rollout server did not start again: %s", error)
                continue
            del self._dead[name]
            self._restarted += 1
            revived.append(name)
        return revived

    async def _start(self, name: str) -> Replica:
        incarnation = self._incarnations.get(name, 0)
        self._incarnations[name] = incarnation + 1
        process = await self._launcher.start(
            server_spec(
                self._config,
                name if not incarnation else f"{name}-restart-{incarnation}",
                weights_directory=self._weights_directory,
            )
        )
        try:
            address = await process.ready(self._config.rollout.start_deadline_s)
        except ProcessError:
            await process.stop()  # else one that is only late would hold its memory
            raise
        client = WeightSyncClient(
            name,
            address,
            control_deadline_s=self._config.sync.control_deadline_s,
            commit_deadline_s=self._config.sync.commit_deadline_s,
            security=ServerSecurity.of(self._config.rollout).read(),
        )
        return Replica(name, address, process, client)

    @staticmethod
    async def _end(replica: Replica) -> None:
        await replica.client.aclose()
        await replica.process.stop()


def _succeeded(task: "asyncio.Task[Replica]") -> bool:
    return not task.cancelled() and task.exception() is None
