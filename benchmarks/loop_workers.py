"""Loop workers: what a turn costs the driver, a worker and the router; what 10,000 in flight do.

Workers, router, driver's end, gRPC, chat template, parser and tool are real. The server is
elsewhere, as far as that can be on one machine: a process that replies at once with prepared
tokens, whose CPU time is measured and left out. The figure is CPU time, since the machine's other
work is not ours: with N workers on a core each, a trajectory takes no less than the
most of (worker / N, driver, router), so 2 workers carry

    worker / max(worker / 2, driver, router)

times what 1 does. Beside it stands the rate by the clock, for what the machine did meanwhile. With
`--in_flight` as many tasks wait at the server until all of them are there, and the driver's memory
is that of holding them::

    python benchmarks/loop_workers.py [--rounds 3] [--trajectories 500] [--turns 5]
        [--in_flight 10000]
"""

import argparse
import asyncio
import os
import time

from loop_setting import (
    SETTINGS,
    config_of,
    cpu_s,
    pss_mib,
    running_workers,
    script_of,
    started,
    task,
)
from null_server import null_server

from treadle.agent_loop import Trajectory
from treadle.trainer.rollout.workers.pool import LoopWorkers


async def run(workers: LoopWorkers, trajectories: int, in_flight: int) -> float:
    """Runs tasks; returns the driver's memory in MiB when the first of them has ended."""
    held_mib = 0.0
    num_ended = 0

    async def sink(trajectory: Trajectory) -> None:
        nonlocal num_ended, held_mib
        assert trajectory.error is None, trajectory.error
        assert trajectory.reward == 1.0
        num_ended += 1
        if num_ended == 1:
            held_mib = pss_mib({os.getpid()})

    runner = workers.runner(SETTINGS, max_in_flight=in_flight)
    await runner.run((task(number) for number in range(trajectories)), sink)
    assert num_ended == trajectories
    return held_mib


async def measure(
    count: int, trajectories: int, turns: int, in_flight: int, *, gate: bool
) -> dict[str, float]:
    """Runs trajectories on workers.

    Args:
        count: Number of workers.
        trajectories: Number of them.
        turns: Of each.
        in_flight: Maximum number at a time.
        gate: Whether all wait until as many as may be are in flight.

    Returns:
        CPU milliseconds of a turn by process, trajectories a second by the clock, and by how many
        MiB the driver and the workers have grown.
    """
    config = config_of(turns=turns, workers=count)
    async with (
        null_server(script_of(config, turns), gate=in_flight if gate else 0) as server,
        running_workers(config, server) as (workers, logs),
    ):
        if not gate:
            await run(workers, 50 * count, in_flight)  # imports, caches
        pids = {
            "worker": started(logs, "worker*"),
            "router": started(logs, "router*"),
            "driver": {os.getpid()},
        }
        before_mib = {name: pss_mib(of) for name, of in pids.items()}
        before_s, began = {name: cpu_s(of) for name, of in pids.items()}, time.perf_counter()
        held_mib = await run(workers, trajectories, in_flight)
        wall_s = time.perf_counter() - began
        used_s = {name: cpu_s(of) - before_s[name] for name, of in pids.items()}
        after_mib = pss_mib(pids["worker"])
    return {
        **{name: 1000 * used / (trajectories * turns) for name, used in used_s.items()},
        "rate": trajectories / wall_s,
        "driver_mib": held_mib - before_mib["driver"],
        "worker_mib": after_mib - before_mib["worker"],
    }


async def main() -> None:
    """Measures 1 and 2 workers in turn, or one run with as many in flight as asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trajectories", type=int, default=500)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--in_flight", type=int, default=0)
    args = parser.parse_args()
    if args.in_flight:
        for _ in range(args.rounds):
            found = await measure(2, args.in_flight, args.turns, args.in_flight, gate=True)
            each = 1024 * found["driver_mib"] / args.in_flight
            print(
                f"{args.in_flight} in flight: driver {found['driver_mib']:.0f} MiB more, "
                f"{each:.1f} KiB each, both workers {found['worker_mib']:.0f} MiB more; "
                f"ms CPU a turn: driver {found['driver']:.3f}, router {found['router']:.3f}, "
                f"workers {found['worker']:.3f}; {found['rate']:.0f} trajectories/s; "
                f"load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
        return
    for count in (1, 2) * args.rounds:
        found = await measure(count, args.trajectories, args.turns, 200, gate=False)
        worker = found["worker"]
        gain = worker / max(worker / 2, found["driver"], found["router"])
        print(
            f"{count} workers: ms CPU a turn: worker {worker:.3f}, router {found['router']:.3f}, "
            f"driver {found['driver']:.3f}; {found['rate']:.0f} trajectories/s by the clock; "
            f"2 workers carry {gain:.2f} times what 1 does; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    asyncio.run(main())
