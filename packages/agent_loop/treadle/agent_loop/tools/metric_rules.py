"""The rule of each metric that tools and interactions report: one name has one (`tracing.Reduce`).

Invariant: two rules for one name are an error: before the run if the tools and interactions declare
their metrics (`ReportsMetrics`), else at the first report that differs. Pure functions.
"""

from collections.abc import Iterable, Mapping
from typing import Final, Protocol, runtime_checkable

from treadle.agent_loop.errors import SetupError
from treadle.tracing import Metric, Reduce

__all__ = ["COUNTS", "ReportsMetrics", "check_metric_rules", "other_rule"]

COUNTS: Final = (
    "calls",
    "unknown",
    "failures",
    "timeouts",
    "over_cap",
    "close_errors",
    "left_behind",
)
"""The counts of a toolbox; each is the metric `tool/NAME`."""
_OWN: Final[Mapping[str, Reduce]] = {
    **{f"tool/{name}": Reduce.SUM for name in COUNTS},
    "agent_loop/tool_calls_s": Reduce.MEAN,
    "interaction/replies": Reduce.SUM,
}


@runtime_checkable
class ReportsMetrics(Protocol):
    """A tool or an interaction that declares the metrics of its results.

    Without it, a name that two of them report under different rules ends the first trajectory that
    has both.
    """

    @property
    def metric_rules(self) -> Mapping[str, Reduce]:
        """The rule of each metric, by its name."""
        ...


def check_metric_rules(reporters: Mapping[str, object]) -> None:
    """Checks that all give a name the same rule.

    Args:
        reporters: Tools and interactions, by what messages call them, as "tool 'search'".

    Raises:
        SetupError: Two do not; the message names both.
    """
    rules = {name: ("the agent loop itself", rule) for name, rule in _OWN.items()}
    for reporter, each in reporters.items():
        for name, rule in each.metric_rules.items() if isinstance(each, ReportsMetrics) else ():
            other, known = rules.setdefault(name, (reporter, rule))
            if known is not rule:
                raise SetupError(
                    f"the metric {name!r} is combined by {known.name} as {other} reports it, and "
                    f"by {rule.name} as {reporter} does: give one of them another name"
                )


def other_rule(
    metrics: Iterable[Metric], reporters: Mapping[str, object], seen: dict[str, Reduce]
) -> str | None:
    """Returns what is wrong with reported metrics, or None; keeps their rules in `seen`.

    Args:
        seen: Rules of earlier results of the trajectory.
    """
    if not seen:
        seen |= _OWN
        for each in reporters.values():
            seen |= each.metric_rules if isinstance(each, ReportsMetrics) else {}
    for name, _, rule in metrics:
        if (known := seen.setdefault(name, rule)) is not rule:
            return (
                f"it reports the metric {name!r} as {rule.name}, and another report of that name "
                f"is {known.name}: give them different names"
            )
    return None
