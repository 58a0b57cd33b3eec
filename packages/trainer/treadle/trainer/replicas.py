"""The replicas: the rollout servers of a run, as processes and as addresses.

Invariant: a replica that is `live` was serving when it was last looked at, and has taken every
weight version that was published since it joined. A replica that dies leaves the rotation; it is
started again, as often as the configuration allows, by `revive`, which its caller follows with a
publication of the present weights. Nobody routes to a replica between its start and that.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from treadle.agent_loop.aio import concurrently
from treadle.trainer.config.schema import FileTransportConfig, RunConfig
from treadle.trainer.launch.environment import cpu_count, thread_variables
from treadle.trainer.launch.local import describe_exit
from treadle.trainer.launch.process import Launcher, Process, ProcessError, ProcessSpec
from treadle.trainer.weight_sync.client import WeightSyncClient

__all__ = ["Replica", "ReplicaSet", "ReplicasLostError"]

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
        self._restarts = 0
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
        await asyncio.gather(*(self._end(replica) for replica in self._live.values()))
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

    async def look(self) -> Sequence[str]:
        """Takes servers that died out of the rotation; a sentence about each."""
        said = []
        for replica in self.live:
            status = await replica.process.poll()
            if status is not None:
                tail = await replica.process.log_tail(10)
                said.append(f"{replica.name} ({replica.address}) {describe_exit(status)}")
                await self.drop(replica.name, f"{said[-1]}; its log ends with:\n{tail}")
        return said

    async def drop(self, name: str, cause: str) -> None:
        """Takes a server out of the rotation and ends its process."""
        _log.warning("rollout server lost: %s", cause)
        replica = self._live.pop(name)
        self._dead[name] = cause
        await self._end(replica)

    async def revive(self) -> Sequence[str]:
        """Starts dead replicas again while restarts are left; the names of those that serve.

        They hold the weights of the model directory, until the caller publishes.

        Raises:
            ReplicasLostError: none is left, and none may be started.
        """
        revived = []
        for name in list(self._dead):
            if self._restarts >= self._config.rollout.max_restarts:
                break
            self._restarts += 1
            try:
                self._live[name] = await self._start(name)
            except ProcessError as error:
                self._dead[name] = str(error)
                _log.warning("rollout server did not start again: %s", error)
                continue
            del self._dead[name]
            revived.append(name)
        if not self._live:
            raise ReplicasLostError(
                f"no rollout server is left, after {self._restarts} restarts "
                f"(rollout.max_restarts={self._config.rollout.max_restarts}):\n"
                + "\n".join(self._dead.values())
            )
        return revived

    async def _start(self, name: str) -> Replica:
        incarnation = self._incarnations.get(name, 0)
        self._incarnations[name] = incarnation + 1
        process = await self._launcher.start(
            ProcessSpec(
                name=name if not incarnation else f"{name}-restart-{incarnation}",
                module="treadle.rollout_server",
                args=self._arguments(),
                env=self._environment(),
                gpus=getattr(self._config.launch, "gpus_per_replica", 0.0),
            )
        )
        address = await process.ready(self._config.launch.start_deadline_s)
        client = WeightSyncClient(
            name,
            address,
            control_deadline_s=self._config.sync.control_deadline_s,
            commit_deadline_s=self._config.sync.commit_deadline_s,
        )
        return Replica(name, address, process, client)

    @property
    def _threads(self) -> int:
        rollout = self._config.rollout
        return rollout.threads or max(1, cpu_count() // rollout.num_replicas)

    def _environment(self) -> Mapping[str, str]:
        return thread_variables(self._threads)

    def _arguments(self) -> tuple[str, ...]:
        rollout = self._config.rollout
        # Any one server must be able to queue what all have in flight: the others may die.
        most = rollout.max_in_flight * rollout.num_replicas
        args = {
            "engine": rollout.name,
            "address": "{host}:0",
            "model.path": str(self._config.model.path),
            "model.dtype": rollout.dtype,
            "model.context_length": str(rollout.context_length),
            "model.num_threads": str(self._threads),
            "model.max_num_seqs": str(rollout.max_in_flight),
            "admission.max_in_flight": str(rollout.max_in_flight),
            "admission.max_queued": str(most),
        }
        if isinstance(self._config.sync.transport, FileTransportConfig):
            args["weights.directory"] = str(self._weights_directory)
        if getattr(self._config.launch, "allow_plaintext_on_network", False):
            args["insecure_allow_plaintext_beyond_loopback"] = "true"
        return tuple(part for key, value in args.items() for part in (f"--{key}", value))

    @staticmethod
    async def _end(replica: Replica) -> None:
        await replica.client.aclose()
        await replica.process.stop()
