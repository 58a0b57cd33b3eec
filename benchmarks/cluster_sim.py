"""A cluster before it is bought: our router and up to 1,024 simulated servers, in simulated time.

The router is `StickySession`, the code that clients and the routing service run, in this process
and on the real clock; servers, tools and sessions are `routing_sim`, in simulated time. A setting
is a number of servers and of sessions in flight; as many sessions start as end, until the trace
(`routing_trace`) is through.

What is printed of each setting: sequences that run over the places of all servers (utilisation),
the share of server time in which nothing runs (idle), tokens per second that the cluster sampled,
the CPU time of the router's decisions, and the memory of its table. `docs/scaling.md` has results
and what follows from them.

`--schedules` runs whole trainings instead (`schedule_sim`): the rules of sync, overlap, stream and
async and their queue, in front of the same router and servers. A step trains on 48 trajectories per
server, and 98 may be in flight per server.

    python benchmarks/cluster_sim.py [--servers 1024] [--sessions 100000] [--turns 3]
    python benchmarks/cluster_sim.py --schedules [--servers 1024] [--steps 5] [--train_s 20]
"""

import argparse
import time
import tracemalloc
from dataclasses import dataclass

from routing_replay import COST, Ours
from routing_sim import Replay, Request, Session, Simulation
from routing_trace import COMMON_TOKENS, GROUP_SIZE, make_trace
from schedule_sim import SCHEDULES, Training, run_training

from treadle.agent_loop import StickySession

PER_STEP, PER_SERVER = 48, 98
"""Trajectories per server: of a step, and in flight. 98 would fill the places of a server."""
SYNC_S = 2.0


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
    return [
        Session(index=s.index, task=s.task, turns=s.turns[:turns])
        for s in make_trace(0, num_sessions=sessions)
    ]


def training(servers: int, *, steps: int, train_s: float) -> Training:
    """Returns a run of which each server has its share."""
    return Training(
        groups=servers * PER_STEP // GROUP_SIZE,
        steps=steps,
        train_s=train_s,
        sync_s=SYNC_S,
        max_in_flight=servers * PER_SERVER,
    )


def training_trace(run: Training, turns: int) -> list[Session]:
    """Returns the sessions of a run; groups beyond the last step's are begun and not trained on."""
    return short_trace(run.groups * (run.steps + 2) * GROUP_SIZE, turns)


def print_schedules(servers: int, *, steps: int, train_s: float, turns: int) -> None:
    """Prints a line for each size and schedule."""
    print(
        f"{'servers':>7} {'schedule':>8} {'trajectories/h':>14} {'to sync':>7} {'utilisation':>11} "
        f"{'idle':>6} {'policy waits':>12} {'staleness':>22} {'held':>7} {'M tokens':>8} "
        f"{'schedule us':>11} {'router/s':>8}"
    )
    for size in dict.fromkeys(size for size in (16, 128, servers) if size <= servers):
        run = training(size, steps=steps, train_s=train_s)
        trace = training_trace(run, turns)
        base: float | None = None
        for name, rule in SCHEDULES.items():
            policy = Timed(size)
            got = run_training(rule(), run, trace, policy, cost=COST, servers=size)
            base = base or got.trajectories_per_hour
            ages = " ".join(f"{age}: {share:.1%}" for age, share in got.staleness.items())
            print(
                f"{size:7} {name:>8} {got.trajectories_per_hour:14,.0f} "
                f"{got.trajectories_per_hour / base:7.2f} {got.utilisation:11.1%} {got.idle:6.1%} "
                f"{got.policy_waits:12.1%} {ages:>22} {got.most_held:7,} "
                f"{got.most_held_tokens / 1e6:8.0f} {1e6 * got.decision_s / got.decisions:11.1f} "
                f"{policy.decisions / policy.decision_s:8,.0f}",
                flush=True,
            )


def main() -> None:
    """Prints a line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=1024)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=3, help="turns of a session, at most")
    parser.add_argument("--schedules", action="store_true", help="whole trainings, by schedule")
    parser.add_argument("--steps", type=int, default=6, help="of a training, at least 4")
    parser.add_argument("--train_s", type=float, default=20.0, help="seconds of an update")
    arguments = parser.parse_args()
    if arguments.schedules:
        print_schedules(
            arguments.servers,
            steps=arguments.steps,
            train_s=arguments.train_s,
            turns=arguments.turns,
        )
        return
    print(
        f"{'servers':>7} {'sessions':>9} {'in flight':>9} {'utilisation':>11} {'idle':>6} "
        f"{'tokens/s':>9} {'p90 s':>6} {'full/mean':>9} {'moves':>6} {'decisions/s':>11}"
    )
    for setting in settings(arguments.servers, arguments.sessions):
        trace = short_trace(setting.sessions, arguments.turns)
        outcome = simulate(setting, trace)
        replay = outcome.replay
        print(
            f"{setting.servers:7} {setting.sessions:9,} {setting.in_flight:9,} "
            f"{replay.utilisation:11.1%} {replay.idle:6.1%} "
            f"{outcome.sampled_tokens / replay.wall_s:9,.0f} {replay.p90_latency_s:6.0f} "
            f"{replay.imbalance:9.2f} {replay.num_moves:6,} {outcome.decisions_per_s:11,.0f}",
            flush=True,
        )
    each = table_bytes(arguments.servers, arguments.sessions)
    print(
        f"the router's table: {each:.0f} bytes per open session, "
        f"{each * arguments.sessions / 1e6:.0f} MB for {arguments.sessions:,}"
    )


if __name__ == "__main__":
    main()
