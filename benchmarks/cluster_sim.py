"""A cluster before it is bought: schedules, server pool and router of a run, simulated servers.

`schedule_sim` trains: the rules of sync, overlap, stream and async with their queue, the real
`ServerPool` and the real routing service, in front of up to 1,024 simulated servers (prefill,
decode, prefix cache) and 100,000 sessions with tools, in simulated time. Servers die meanwhile, and
others start in their place. A step trains on 48 trajectories per server, and 98 may be in flight
per server. Then the costs of the driver's pool over real gRPC and of loop workers are measured
(`cluster_limits`), and what the runs take of each process is computed from them.

A line for each size and schedule has: trajectories per hour; sequences that run over the slots of
all servers (utilisation); the share of the servers' time in which nothing runs (idle; a server that
died runs nothing until another is there), and of the policy's in which it waits; the staleness of
groups; servers that died, and those that serve in their place, with the weights of the moment;
calls that were sent again; trajectories and tokens held; microseconds of CPU of a decision of the
schedule; the router's decisions per second of CPU.

`--placement` has the router alone in front of the servers: a setting is a number of servers and of
sessions in flight; as many sessions start as end, until the trace (`routing_trace`) is through.

    python benchmarks/cluster_sim.py [--servers 1024] [--steps 6] [--train_s 20] [--turns 3]
    python benchmarks/cluster_sim.py --placement [--servers 1024] [--sessions 100000] [--turns 3]
"""

import argparse
import asyncio
import logging
import os
import resource
import statistics
import time
import tracemalloc
from dataclasses import dataclass

from cluster_limits import Costs, costs_of, limits_of, loop_costs, pool_costs
from routing_replay import COST, Ours
from routing_sim import Replay, Request, Session, Simulation
from routing_trace import COMMON_TOKENS, GROUP_SIZE, make_trace
from schedule_sim import SCHEDULES, Run, Training, run_training

from treadle.agent_loop import StickySession

PER_STEP, PER_SERVER = 48, 98
"""Trajectories per server: of a step, and in flight. 98 would fill the slots of a server."""
SYNC_S, START_S = 2.0, 60.0
"""Seconds that weights travel, and until a server that was started serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A cluster.

    Attributes:
        servers: Number of servers.
        in_flight: Sessions under way; the next starts when one ends.
        sessions: Number of sessions of the trace.
    """

    servers: int
    in_flight: int
    sessions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The measurements of one setting.

    Attributes:
        replay: In simulated time.
        sampled_tokens: Of all sessions.
        decisions: Number of calls of the router: a pick per turn, an end per session.
        decision_s: CPU seconds that they took together.
    """

    replay: Replay
    sampled_tokens: int
    decisions: int
    decision_s: float

    @property
    def decisions_per_s(self) -> float:
        """Decisions per second of one CPU."""
        return self.decisions / max(1e-9, self.decision_s)


class Timed(Ours):
    """Our policy, with the CPU time of its decisions."""

    def __init__(self, num_engines: int) -> None:
        super().__init__(num_engines, cache_tokens=None)
        self.decisions = 0
        self.decision_s = 0.0

    def pick(self, request: Request) -> int | None:
        """See `Ours.pick`."""
        begun = time.process_time_ns()
        place = super().pick(request)
        self._count(begun)
        return place

    def finish(self, session: Session) -> None:
        """See `Ours.finish`."""
        begun = time.process_time_ns()
        super().finish(session)
        self._count(begun)

    def _count(self, begun_ns: int) -> None:
        self.decision_s += (time.process_time_ns() - begun_ns) * 1e-9
        self.decisions += 1


def simulate(setting: Setting, trace: list[Session]) -> Outcome:
    """Runs the trace on a cluster."""
    policy = Timed(setting.servers)
    replay = Simulation(
        trace,
        policy,
        cost=COST,
        num_engines=setting.servers,
        max_in_flight=setting.in_flight,
        common_tokens=COMMON_TOKENS,
    ).run()
    assert policy.num_open == 0, "every session ends"
    return Outcome(
        replay=replay,
        sampled_tokens=sum(turn.sampled_tokens for s in trace for turn in s.turns),
        decisions=policy.decisions,
        decision_s=policy.decision_s,
    )


def table_bytes(servers: int, sessions: int) -> float:
    """Returns the bytes of the router's table per open session."""
    router = StickySession([str(number) for number in range(servers)])
    tracemalloc.start()
    for number in range(sessions):
        router.pick(f"step-1/row-{number}/0", context_tokens=1000)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / sessions


def settings(servers: int, sessions: int) -> list[Setting]:
    """Returns clusters up to the largest, each with a tenth to all of the sessions in flight."""
    sizes = [size for size in (16, 128, servers) if size <= servers]
    return [
        Setting(
            servers=size,
            in_flight=max(1, sessions * size // servers * share // 100),
            sessions=sessions * size // servers,
        )
        for size in dict.fromkeys(sizes)
        for share in (25, 50, 100)
    ]


def short_trace(sessions: int, turns: int) -> list[Session]:
    """Returns the first turns of each session of the trace."""
    return make_trace(0, num_sessions=sessions, max_turns=turns)


def training(servers: int, *, steps: int, train_s: float, deaths_per_hour: float) -> Training:
    """Returns a run of which each server has its share."""
    return Training(
        servers=servers,
        groups=servers * PER_STEP // GROUP_SIZE,
        steps=steps,
        train_s=train_s,
        sync_s=SYNC_S,
        per_server=PER_SERVER,
        death_s=3600 / (servers * deaths_per_hour),
        start_s=START_S,
    )


def training_trace(run: Training, turns: int) -> list[Session]:
    """Returns the sessions of a run; groups beyond the last step's are begun and not trained on."""
    return short_trace(run.groups * (run.steps + 2) * GROUP_SIZE, turns)


def run_schedules(settings: Training, turns: int) -> dict[str, Run]:
    """Trains with each schedule, and prints a line for each."""
    trace = training_trace(settings, turns)
    runs: dict[str, Run] = {}
    for name, rule in SCHEDULES.items():
        runs[name] = got = run_training(rule(), settings, trace, COST)
        ages = " ".join(f"{age}: {share:.1%}" for age, share in got.staleness.items())
        to_sync = got.trajectories_per_hour / runs["sync"].trajectories_per_hour
        print(
            f"{settings.servers:7} {name:>8} {got.trajectories_per_hour:14,.0f} {to_sync:7.2f} "
            f"{got.utilisation:11.1%} {got.idle:6.1%} {got.policy_waits:12.1%} {ages:>27} "
            f"{got.died:5} {got.joined:6} {got.sent_again:10,} {got.most_held:7,} "
            f"{got.most_held_tokens / 1e6:8.0f} {1e6 * got.decision_s / got.decisions:11.1f} "
            f"{got.placements / got.placement_s:8,.0f}",
            flush=True,
        )
    return runs


def measure_costs(servers: int) -> Costs:
    """Measures what processes cost, and prints it."""
    pool = asyncio.run(pool_costs(servers, rounds=3))
    print(f"the driver's pool over gRPC, {servers} servers, load {os.getloadavg()[0]:.0f}")
    for move, values in pool.items():
        unit = "" if move.startswith("MiB") else " ms of CPU"
        spread = f"({min(values):,.2f} to {max(values):,.2f})" if len(values) > 1 else ""
        print(f"  {move:26} {statistics.median(values):,.2f}{unit} {spread}")
    loop = asyncio.run(loop_costs())
    print(
        f"loop workers, load {os.getloadavg()[0]:.0f}: ms of CPU a turn: worker "
        f"{loop['worker']:.3f}, driver {loop['driver']:.3f}, router {loop['router']:.3f}"
    )
    return costs_of(loop, pool, servers)


def print_limits(settings: Training, runs: dict[str, Run], costs: Costs) -> None:
    """Prints what the runs take of each process, and what is the first to be full."""
    print(
        f"{'servers':>7} {'schedule':>8} {'turns/s':>8} {'workers':>7} "
        f"{'driver: trajectories':>20} {'pool':>6} {'schedule':>8} {'router':>6} {'driver GB':>9}  "
        "one process carries"
    )
    for name, run in runs.items():
        of = limits_of(run, settings.servers, settings.servers * settings.per_server, costs)
        carried = ", ".join(f"{process} {servers:,.0f}" for process, servers in of.servers.items())
        print(
            f"{settings.servers:7} {name:>8} {run.turns_per_s:8,.0f} {of.workers:7.1f} "
            f"{of.trajectories:20.1%} {of.pool:6.1%} {of.schedule:8.1%} {of.router:6.1%} "
            f"{of.memory_gb:9.1f}  {carried}: next, {of.next_limit}",
        )


def print_placement(servers: int, sessions: int, turns: int) -> None:
    """Prints a line for each setting of the router alone."""
    print(
        f"{'servers':>7} {'sessions':>9} {'in flight':>9} {'utilisation':>11} {'idle':>6} "
        f"{'tokens/s':>9} {'p90 s':>6} {'full/mean':>9} {'moves':>6} {'decisions/s':>11}"
    )
    for setting in settings(servers, sessions):
        trace = short_trace(setting.sessions, turns)
        outcome = simulate(setting, trace)
        replay = outcome.replay
        print(
            f"{setting.servers:7} {setting.sessions:9,} {setting.in_flight:9,} "
            f"{replay.utilisation:11.1%} {replay.idle:6.1%} "
            f"{outcome.sampled_tokens / replay.wall_s:9,.0f} {replay.p90_latency_s:6.0f} "
            f"{replay.imbalance:9.2f} {replay.num_moves:6,} {outcome.decisions_per_s:11,.0f}",
            flush=True,
        )
    each = table_bytes(servers, sessions)
    print(
        f"the router's table: {each:.0f} bytes per open session, "
        f"{each * sessions / 1e6:.0f} MB for {sessions:,}"
    )


def main() -> None:
    """Prints a line for each setting."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--servers", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=3, help="turns of a session, at most")
    parser.add_argument("--steps", type=int, default=6, help="of a training, at least 4")
    parser.add_argument("--train_s", type=float, default=20.0, help="seconds of an update")
    parser.add_argument("--deaths_per_hour", type=float, default=1.0, help="of each server")
    parser.add_argument("--placement", action="store_true", help="the router alone")
    parser.add_argument("--sessions", type=int, default=100_000, help="with --placement")
    arguments = parser.parse_args()
    if arguments.placement:
        print_placement(arguments.servers, arguments.sessions, arguments.turns)
        return
    logging.disable(logging.WARNING)  # the pool tells of each server that dies
    print(
        f"{'servers':>7} {'schedule':>8} {'trajectories/h':>14} {'to sync':>7} {'utilisation':>11} "
        f"{'idle':>6} {'policy waits':>12} {'staleness':>27} {'died':>5} {'joined':>6} "
        f"{'sent again':>10} {'held':>7} {'M tokens':>8} {'schedule us':>11} {'router/s':>8}"
    )
    sizes = sorted({min(size, arguments.servers) for size in (16, 128, arguments.servers)})
    found = []
    for size in sizes:
        setting = training(
            size,
            steps=arguments.steps,
            train_s=arguments.train_s,
            deaths_per_hour=arguments.deaths_per_hour,
        )
        found.append((setting, run_schedules(setting, arguments.turns)))
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"the simulation held {peak_gb:.1f} GB, load {os.getloadavg()[0]:.0f}")
    costs = measure_costs(arguments.servers)
    for setting, runs in found:
        print_limits(setting, runs, costs)


if __name__ == "__main__":
    main()
