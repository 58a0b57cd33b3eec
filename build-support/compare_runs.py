"""Compares the metrics of two runs: `compare_runs.py RUN RUN` exits with 1 at the first difference.

Two runs of one configuration learn the same, bit for bit. A change that must not alter results is
checked against a run of the code before it. Standard library only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The engine's log-probabilities depend, in their last digits, on which sequences share a step, and
# so on when requests arrive. With algorithm.old_logprobs=policy, the default, they enter no update:
# the policy computes the log-probabilities that it trains on itself.
BATCHING = ("rollout/kl", "rollout/logprob_diff_")
WALL_TIME = ("_s", "_per_second")
TIME_SHARES = ("/time_share/", "/busy_", "policy/mfu")
# Which trajectory is the slowest is a matter of wall time, and so are its lengths.
SLOWEST = "agent_loop/slowest/"


def is_compared(metric: str) -> bool:
    """Returns whether two runs of the same code agree on a metric bit for bit."""
    timed = metric.startswith("time/") or metric.endswith(WALL_TIME)
    timed |= any(part in metric for part in TIME_SHARES)
    return not timed and not metric.startswith((SLOWEST, *BATCHING))


def differences(first: Path, second: Path, *, leave_out: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields each difference between the `metrics.jsonl` of two run directories, in order.

    Args:
        first: A run directory.
        second: Another one.
        leave_out: Beginnings of further metrics that are not compared.
    """
    lines, other_lines = (_read(run) for run in (first, second))
    for number, (line, other) in enumerate(zip(lines, other_lines, strict=False), start=1):
        for metric in sorted(filter(is_compared, line.keys() | other.keys())):
            if metric.startswith(leave_out):
                continue
            value, other_value = line.get(metric, "missing"), other.get(metric, "missing")
            # By their text: 1 is not 1.0, and NaN is NaN.
            if repr(value) != repr(other_value):
                yield f"line {number}, {metric}: {value} and {other_value}"
    if len(lines) != len(other_lines):
        yield f"number of lines: {len(lines)} and {len(other_lines)}"


def main(argv: list[str]) -> int:
    """Prints what was compared or the first difference; returns the exit status."""
    first, second = map(Path, argv)
    found = next(differences(first, second), None)
    if found is not None:
        print(found)
        return 1
    lines = _read(first)
    names = {metric for line in lines for metric in line if is_compared(metric)}
    print(f"{len(lines)} lines and {len(names)} metrics are equal")
    return 0


def _read(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: compare_runs.py RUN_DIRECTORY RUN_DIRECTORY")
    sys.exit(main(sys.argv[1:]))
