"""The cost of a run's processes on this machine, and the number of servers that each carries.

Measured, in CPU time: the driver's server pool over real gRPC, and a turn at a loop worker, at the
driver that hands tasks out and takes trajectories, and at the router (`loop_workers`). For the
pool, each server has an address of the loopback network, and one process (`null_server`) answers at
all of them; the processes of servers are simulated. No weights are sent: an update is what the pool
does around one, and the round's two calls to each server count as two looks.

From these and a simulated run (`schedule_sim`) follows the share of a core that each process takes.
"""

import itertools
import os
import signal
import statistics
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loop_workers
from loop_setting import pss_mib
from null_server import Script, null_server
from schedule_sim import Run
from simulated_cluster import SimulatedLauncher

from treadle.agent_loop.rpc import Requirements
from treadle.trainer.config.rollout import RolloutConfig
from treadle.trainer.config.schema import Config, DataConfig, ModelConfig
from treadle.trainer.launch.process import ProcessSpec
from treadle.trainer.rollout.server_pool import ServerPool

__all__ = ["Costs", "Limits", "costs_of", "limits_of", "loop_costs", "pool_costs"]

_SCRIPT = Script(call=(1,), last=(1,), turns=1)  # nothing is sampled
_HUNDREDTH = 100
_WORKER = "a loop worker"
_TOKEN_BYTES = 14
"""The driver holds as much for a token of a batch and its trajectory, with text (`data_plane`)."""
_TASK_BYTES = 1700
"""The driver holds as much for a task in flight (`loop_workers --in_flight`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs that were measured on this machine.

    Attributes:
        worker_ms: CPU milliseconds of a turn at a loop worker.
        driver_ms: The same at the driver: a turn's share of handing out a task and taking its
            trajectory.
        router_ms: The same at the router.
        pool_ms: CPU milliseconds of the driver per server and step.
        server_mib: Memory of the driver per server.
    """

    worker_ms: float
    driver_ms: float
    router_ms: float
    pool_ms: float
    server_mib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The load of a run on its processes.

    Attributes:
        workers: Loop workers that are busy all the time.
        trajectories: Share of a core that tasks and trajectories take of the driver.
        pool: The same of its server pool.
        schedule: The same of its schedule.
        router: Share of a core that the router takes.
        memory_gb: Of the driver.
        servers: Largest number of servers by process, if nothing but the number grows.
    """

    workers: float
    trajectories: float
    pool: float
    schedule: float
    router: float
    memory_gb: float
    servers: dict[str, float]

    @property
    def next_limit(self) -> str:
        """The process that is full first; loop workers are as many as are asked for."""
        singles = {name: each for name, each in self.servers.items() if name != _WORKER}
        return min(singles, key=singles.__getitem__)


def limits_of(run: Run, servers: int, in_flight: int, costs: Costs) -> Limits:
    """Returns the load of a run, and the number of servers that each process carries."""
    workers = run.turns_per_s * costs.worker_ms / 1000
    trajectories = run.turns_per_s * costs.driver_ms / 1000
    pool = costs.pool_ms * servers / 1000 / run.step_s
    router = run.turns_per_s * costs.router_ms / 1000
    driver = trajectories + pool + run.schedule_share
    held = run.most_held_tokens * _TOKEN_BYTES + in_flight * _TASK_BYTES
    return Limits(
        workers=workers,
        trajectories=trajectories,
        pool=pool,
        schedule=run.schedule_share,
        router=router,
        memory_gb=(held + servers * costs.server_mib * (1 << 20)) / 1e9,
        servers={
            _WORKER: servers / workers,
            "the driver": servers / driver,
            "the router": servers / router,
        },
    )


async def loop_costs() -> dict[str, float]:
    """Returns CPU milliseconds of a turn by process: worker, driver, router."""
    return await loop_workers.measure(1, 400, 5, 200, gate=False)


async def pool_costs(servers: int, rounds: int) -> dict[str, list[float]]:
    """Returns the CPU milliseconds of each move of the pool, and the MiB of a server."""
    found: dict[str, list[float]] = {}

    async def timed(move: str, work: Awaitable[object]) -> None:
        began = time.process_time()
        await work
        found.setdefault(move, []).append((time.process_time() - began) * 1000)

    async with null_server(_SCRIPT, host="0.0.0.0") as answers:
        port = answers.address.rpartition(":")[2]
        numbers = itertools.product(range(1, 256), range(1, 255))
        addresses = (f"127.0.{i}.{k}:{port}" for i, k in numbers)

        def listen(_: ProcessSpec) -> str:
            return next(addresses)

        launcher = SimulatedLauncher(listen, start_s=0.0)
        config = Config(
            data=DataConfig(train_files=(Path("rows.jsonl"),)),
            model=ModelConfig(path=Path("model")),
            rollout=RolloutConfig(num_replicas=servers, max_restarts=servers * rounds),
        )
        own = {os.getpid()}
        before = pss_mib(own)
        async with ServerPool(launcher, config, publish=_publish) as pool:
            await timed("connect", pool.connect(Requirements()))
            found["MiB of a server"] = [(pss_mib(own) - before) / servers]
            for version in range(1, 3 * rounds, 3):
                await timed("a look", pool.ensure_healthy())
                await timed("an update", pool.sync_weights(version))
                for server in pool.live[: max(1, servers // _HUNDREDTH)]:
                    launcher.processes[server.address].end(-signal.SIGKILL)
                    await server.ended
                await timed("an update, 1 % died", pool.sync_weights(version + 1))
                await timed("an update, 1 % came back", pool.sync_weights(version + 2))
                if len(pool.live) != servers:
                    raise SystemExit(f"{len(pool.live)} of {servers} servers live")
    return found


async def _publish(version: int, servers: Sequence[Any]) -> Any:
    """Sends nothing, as if all servers had taken the weights."""
    return SimpleNamespace(failed={})


def costs_of(loop: dict[str, float], pool: dict[str, list[float]], servers: int) -> Costs:
    """Returns what was measured, per turn, and per server and step."""
    look, update = (statistics.median(pool[move]) for move in ("a look", "an update"))
    return Costs(
        worker_ms=loop["worker"],
        driver_ms=loop["driver"],
        router_ms=loop["router"],
        pool_ms=(3 * look + update) / servers,
        server_mib=pool["MiB of a server"][0],
    )
