"""Routing policies on one trace, in simulated time: who keeps sessions short?

Sessions (`routing_trace`) are replayed against engines with the fake engine's cost model
(`routing_sim`) under the published rules of others (`routing_policies`) and under ours: the
`StickySession` that clients and the routing service use. No clock and no machine has a part in it.

The engines are fake engines as they are by default: 64 slots, a cache of 2**20 tokens. Decoding
takes 20 ms a token. Prefill is 20 times as fast, so that a turn of this trace whose whole prompt
has to be computed takes about 4 times as long as one whose prefix is cached: what was reported of
a real fleet whose hit rate fell from 98 to 5 % (generation four times slower).

Pressure is the number of sessions in flight on four engines: 160 (low: their contexts fit the
caches), 320 (moderate: at times they do not), 610 (high: the whole trace at once). Eight and twelve
engines get the whole trace at once too.

    python benchmarks/routing_replay.py [--seeds 5] [--out results.json]
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routing_policies import CacheAware, ConsistentHash, CumulativeHeap, GlobalInFlight
from routing_sim import Cost, Policy, Replay, Request, Session, Simulation
from routing_trace import COMMON_TOKENS, NUM_SESSIONS, make_trace

from treadle.agent_loop import StickySession

CACHE_TOKENS = 1 << 20
COST = Cost(
    prefill_s_per_token=0.001,
    decode_s_per_token=0.02,
    max_running=64,
    cache_tokens=CACHE_TOKENS,
)
BASE = "verl 2025-08"
OURS = "treadle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One column of pressure."""

    name: str
    num_engines: int
    max_in_flight: int


SETTINGS = (
    Setting(name="low", num_engines=4, max_in_flight=160),
    Setting(name="moderate", num_engines=4, max_in_flight=320),
    Setting(name="high", num_engines=4, max_in_flight=NUM_SESSIONS),
    Setting(name="eight engines", num_engines=8, max_in_flight=NUM_SESSIONS),
    Setting(name="twelve engines", num_engines=12, max_in_flight=NUM_SESSIONS),
)


class Ours:
    """`StickySession` as a policy of the simulation."""

    def __init__(self, num_engines: int, *, cache_tokens: int | None) -> None:
        addresses = [str(number) for number in range(num_engines)]
        self._router = StickySession(addresses, cache_tokens=cache_tokens)

    @property
    def num_open(self) -> int:
        """Number of open sessions."""
        return self._router.num_sessions

    def pick(self, request: Request) -> int | None:
        """Where it says; None when there is no room."""
        name = str(request.session.index)
        place = self._router.pick(name, context_tokens=request.prompt_tokens)
        return int(place) if isinstance(place, str) else None

    def done(self, request: Request) -> None:
        """Its load is sessions, not requests."""

    def finish(self, session: Session) -> None:
        """Frees the slot."""
        self._router.finish(str(session.index))


def policies(num_engines: int, seed: int) -> dict[str, Callable[[], Policy]]:
    """The policies by name; the first is what the others are compared with."""
    return {
        BASE: lambda: CumulativeHeap(num_engines, seed),
        "verl 2026-08": lambda: GlobalInFlight(num_engines),
        "consistent hash": lambda: ConsistentHash(num_engines),
        "cache aware": lambda: CacheAware(num_engines),
        "treadle, no bound": lambda: Ours(num_engines, cache_tokens=None),
        OURS: lambda: Ours(num_engines, cache_tokens=CACHE_TOKENS),
    }


def replay(setting: Setting, policy: Policy, trace: list[Session], cost: Cost = COST) -> Replay:
    """Replays a trace."""
    return Simulation(
        trace,
        policy,
        cost=cost,
        num_engines=setting.num_engines,
        max_in_flight=setting.max_in_flight,
        common_tokens=COMMON_TOKENS,
    ).run()


def undisturbed_s(trace: list[Session]) -> float:
    """Mean session latency with nobody else there and a cache without end: the lower bound."""
    cost = Cost(
        prefill_s_per_token=COST.prefill_s_per_token,
        decode_s_per_token=COST.decode_s_per_token,
        max_running=len(trace),
        cache_tokens=1 << 40,
    )
    setting = Setting(name="", num_engines=1, max_in_flight=len(trace))
    return replay(setting, GlobalInFlight(1), trace, cost).mean_latency_s


def measure(setting: Setting, num_seeds: int) -> dict[str, list[dict[str, float]]]:
    """Every policy on every seed's trace."""
    rows: dict[str, list[dict[str, float]]] = {}
    for seed in range(num_seeds):
        trace = make_trace(seed)
        for name, make in policies(setting.num_engines, seed).items():
            result = replay(setting, make(), trace)
            rows.setdefault(name, []).append(
                {
                    "mean_latency_s": result.mean_latency_s,
                    "p90_latency_s": result.p90_latency_s,
                    "wall_s": result.wall_s,
                    "to_90_percent_s": result.to_90_percent_s,
                    "hit_rate": result.hit_rate,
                    "imbalance": result.imbalance,
                    "num_moves": result.num_moves,
                    "speedup": rows[BASE][seed]["mean_latency_s"] / result.mean_latency_s
                    if rows.get(BASE) and name != BASE
                    else 1.0,
                    "undisturbed_s": undisturbed_s(trace),
                }
            )
    return rows


def print_table(setting: Setting, rows: dict[str, list[dict[str, float]]]) -> None:
    """Medians over the seeds, with the range of the ratio to the older rule of verl."""
    bound = statistics.median(row["undisturbed_s"] for row in rows[BASE])
    print(
        f"\n{setting.name}: {setting.num_engines} engines, {setting.max_in_flight} sessions in "
        f"flight; no policy can have a mean below {bound:.0f} s"
    )
    print(
        f"{'':18} {'mean':>6} {'ratio':>20} {'p90':>6} {'wall':>6} {'to 90%':>7} {'hit':>6} "
        f"{'max/mean':>8} {'moves':>6}"
    )
    for name, results in rows.items():

        def median(key: str, results: list[dict[str, float]] = results) -> float:
            return statistics.median(row[key] for row in results)

        ratios = [row["speedup"] for row in results]
        spread = f"{median('speedup'):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(
            f"{name:18} {median('mean_latency_s'):6.0f} {spread:>20} "
            f"{median('p90_latency_s'):6.0f} {median('wall_s'):6.0f} "
            f"{median('to_90_percent_s'):7.0f} {median('hit_rate'):6.1%} "
            f"{median('imbalance'):8.2f} {median('num_moves'):6.0f}"
        )


def main() -> None:
    """Prints a table for each setting; writes the numbers with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for setting in SETTINGS:
        results[setting.name] = rows = measure(setting, arguments.seeds)
        print_table(setting, rows)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
