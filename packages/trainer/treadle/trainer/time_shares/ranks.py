"""The time shares of the policy ranks, `policy/time_share/<cause>`, from the ranks' own reports.

A rank without a command waits for the driver, whose phases give the cause: `rollout` while it
waited for a batch, `validation` while it validated, else `driver`: servers switched to new weights
or changed their memory, or the driver itself computed or wrote.

Invariant: the shares of a rank add up to 1.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from treadle.policy.config.choices import CAUSES, RankCause
from treadle.trainer.time_shares.busy import busy_range

__all__ = ["RANK_CAUSES", "rank_shares", "ranks_busy"]

_WAITS: Final = (("rollout", "time/rollout_s"), ("validation", "time/validate_s"))
RANK_CAUSES: Final = (
    *(cause for cause in CAUSES if cause != "waiting"),
    *(name for name, _ in _WAITS),
    "driver",
)
"""As in the metrics."""


def rank_shares(
    reports: Sequence[Mapping[RankCause, float]], phases: Mapping[str, float]
) -> dict[str, float]:
    """Returns the shares, means over the ranks, and how busy the least and the most busy one was.

    Args:
        reports: The seconds of each rank by cause, since the last report; at least one.
        phases: Seconds of the driver's phases in the step, as `time/rollout_s`.
    """
    shares = [_of_one(report, phases) for report in reports]
    means = {
        f"policy/time_share/{cause}": sum(each.get(cause, 0.0) for each in shares) / len(shares)
        for cause in RANK_CAUSES
    }
    return means | busy_range("policy", ranks_busy(reports))


def ranks_busy(reports: Sequence[Mapping[RankCause, float]]) -> dict[str, float]:
    """Returns by name of each rank the share of the time in which it executed a command."""
    return {
        f"policy-{number}": 1.0 - report["waiting"] / sum(report.values())
        for number, report in enumerate(reports)
    }


def _of_one(report: Mapping[RankCause, float], phases: Mapping[str, float]) -> dict[str, float]:
    spent: dict[str, float] = {cause: s for cause, s in report.items() if cause != "waiting"}
    left = report["waiting"]
    for name, phase in _WAITS:
        spent[name] = min(left, phases.get(phase, 0.0))
        left -= spent[name]
    spent["driver"] = left
    whole_s = sum(spent.values())
    return {cause: seconds / whole_s for cause, seconds in spent.items()}
