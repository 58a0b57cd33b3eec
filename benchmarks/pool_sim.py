"""The CPU time and memory of one driver's server pool, with up to 1,024 servers.

The pool, its clients, the generator with its router, and gRPC are real. Each server has an address
of the loopback network, and one process (`null_server`) answers at all of them. Processes are
simulated: they start at once and end when the script says so. No weights are sent: an update is
what the pool does around one. The CPU time is that of the driver's process; a look asks each server
how it is.

    python benchmarks/pool_sim.py [--servers 64 1024] [--rounds 3]
"""

import argparse
import asyncio
import itertools
import os
import signal
import statistics
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from loop_setting import pss_mib
from null_server import Script, null_server

from treadle.agent_loop.rpc import Requirements
from treadle.trainer.config.schema import Config, DataConfig, ModelConfig, RolloutConfig
from treadle.trainer.launch.local import describe_exit
from treadle.trainer.launch.process import ProcessSpec
from treadle.trainer.rollout.server_pool import ServerPool

_SCRIPT = Script(call=(1,), last=(1,), turns=1)  # nothing is sampled
_HUNDREDTH = 100


class SimulatedProcess:
    """A server that is ready at once, at a separate address.

    Args:
        name: Of the server.
        address: host:port.
    """

    node = "simulated"

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self._address = address
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def ready(self, deadline_s: float) -> str:
        """Returns its address."""
        return self._address

    async def wait(self) -> int:
        """Returns its exit status, once it has one."""
        return await asyncio.shield(self._status)

    def describe_end(self, status: int) -> str:
        """See `Process`."""
        return describe_exit(status)

    async def log_tail(self, lines: int = 20) -> str:
        """Returns no line."""
        return ""

    async def stop(self, grace_s: float = 10.0) -> None:
        """Ends it."""
        self.end(0)

    def end(self, status: int) -> None:
        """Ends it with a status."""
        if not self._status.done():
            self._status.set_result(status)


class SimulatedLauncher:
    """Starts simulated processes.

    Args:
        port: At which all addresses of the loopback network are answered.
    """

    tls: None = None

    def __init__(self, port: str) -> None:
        numbers = itertools.product(range(1, 256), range(1, 255))
        self._addresses = (f"127.0.{i}.{k}:{port}" for i, k in numbers)
        self.processes: dict[str, SimulatedProcess] = {}

    async def start(self, spec: ProcessSpec) -> SimulatedProcess:
        """Starts one."""
        address = next(self._addresses)
        self.processes[address] = SimulatedProcess(spec.name, address)
        return self.processes[address]

    async def __aenter__(self) -> Self:
        """Does nothing."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Does nothing."""


async def publish(version: int, servers: Sequence[Any]) -> Any:
    """Sends nothing, as if all servers had taken the weights."""
    return SimpleNamespace(failed={})


async def measure(servers: int, rounds: int) -> dict[str, list[float]]:
    """Returns the CPU milliseconds of each move, by its name, and the MiB of a server."""
    found: dict[str, list[float]] = {}

    async def timed(move: str, work: Awaitable[object]) -> None:
        began = time.process_time()
        await work
        found.setdefault(move, []).append((time.process_time() - began) * 1000)

    async with null_server(_SCRIPT, host="0.0.0.0") as answers:
        launcher = SimulatedLauncher(answers.address.rpartition(":")[2])
        config = Config(
            data=DataConfig(train_files=(Path("rows.jsonl"),)),
            model=ModelConfig(path=Path("model")),
            rollout=RolloutConfig(num_replicas=servers, max_restarts=servers * rounds),
        )
        own = {os.getpid()}
        before = pss_mib(own)
        async with ServerPool(launcher, config, publish=publish) as pool:
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


def main() -> None:
    """Prints a row per number of servers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--servers", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for servers in arguments.servers:
        found = asyncio.run(measure(servers, arguments.rounds))
        print(f"{servers} servers, load {os.getloadavg()[0]:.1f}")
        for move, values in found.items():
            unit = "" if move.startswith("MiB") else " ms of CPU"
            spread = f"({min(values):,.2f} to {max(values):,.2f})" if len(values) > 1 else ""
            print(f"  {move:26} {statistics.median(values):,.2f}{unit} {spread}")


if __name__ == "__main__":
    main()
