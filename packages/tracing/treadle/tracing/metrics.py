"""A metric: one named number that a trajectory reports, with the rule for combining many of them.

Invariant: one name has one rule. The rule travels with the value because the measuring code fixes
what the number means (a count adds up, a latency averages), while the code that aggregates
thousands of trajectories has only names. Pure functions.

    aggregate([[Metric("tool/calls", 2.0, Reduce.SUM)], [Metric("tool/calls", 1.0, Reduce.SUM)]])
    # {"tool/calls": 3.0}
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Reduce(enum.Enum):
    """How the values reported under one name become one number."""

    MEAN = "mean"
    """The arithmetic mean over every report; a trajectory that reports twice counts twice."""
    SUM = "sum"
    MAX = "max"
    LAST = "last"
    """The report that came last in the order given; for settings and version numbers."""


class Metric(NamedTuple):
    """One report: a slash-separated name such as "tool/parse_errors", its value, and the rule."""

    name: str
    value: float
    reduce: Reduce = Reduce.MEAN


def aggregate(trajectories: Iterable[Iterable[Metric]]) -> dict[str, float]:
    """Combines the metrics of many trajectories into one flat mapping.

    Args:
        trajectories: The metrics of each trajectory, in the order that `Reduce.LAST` refers to.

    Returns:
        Name to combined value, in the order in which the names were first seen. A name that no
        trajectory reported is absent: it is not zero.

    Raises:
        ValueError: One name is reported under two rules; the message names both.
    """
    rules: dict[str, Reduce] = {}
    values: dict[str, list[float]] = {}
    for metrics in trajectories:
        for name, value, reduce in metrics:
            known = rules.setdefault(name, reduce)
            if known is not reduce:
                raise ValueError(
                    f"metric {name!r} is reported as {reduce.name} and as {known.name}; "
                    "give the two different names"
                )
            values.setdefault(name, []).append(float(value))
    return {name: _combine(rules[name], reports) for name, reports in values.items()}


def _combine(reduce: Reduce, reports: Sequence[float]) -> float:
    match reduce:
        case Reduce.MEAN:
            return sum(reports) / len(reports)
        case Reduce.SUM:
            return sum(reports)
        case Reduce.MAX:
            return max(reports)
        case Reduce.LAST:
            return reports[-1]
