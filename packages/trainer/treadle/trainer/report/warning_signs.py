"""Applies the alerts to one step after another, and to a whole run.

Invariant: an alert is reported in the first step in which it fires, and again after 10, 100, ...
steps in a row; an alert about the setup (`AlertRule.once`) once for each remedy instead. `Watch`
keeps only the metrics that the rules read, so that a long run costs little; all else is pure.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from treadle.trainer.report.alert_rules import KEPT_STEPS, RULES
from treadle.trainer.report.metrics import STEP, TRAINED_TOKENS, Record

__all__ = ["Alert", "Watch", "run_signs"]

_ONCE: Final = frozenset(rule.name for rule in RULES if rule.once)
_READ: Final = frozenset(name for rule in RULES for name in rule.reads)


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert about a step.

    Attributes:
        text: For people: what was measured, and what to do.
    """

    name: str
    text: str


class Watch:
    """Reports the alerts of one step after another.

    Args:
        before: The steps that a resumed run keeps, so that it continues as if it had not ended.
    """

    def __init__(self, before: Sequence[Record] = ()) -> None:
        self._history: deque[Record] = deque(maxlen=KEPT_STEPS)
        self._in_a_row: Counter[str] = Counter()
        self._remedies: set[tuple[str, str]] = set()  # that were told, of alerts told once
        for record in before:
            if record[STEP] > 0:
                self.step(record)

    def step(self, metrics: Record) -> list[Alert]:
        """Returns the alerts to report for a training step."""
        texts = self.firing(metrics)
        for name in [name for name in self._in_a_row if name not in texts]:
            del self._in_a_row[name]
        told = []
        for name, text in texts.items():
            self._in_a_row[name] += 1
            steps = self._in_a_row[name]
            if name in _ONCE:
                remedy = name, text.partition("; ")[2]
                if remedy not in self._remedies:
                    self._remedies.add(remedy)
                    told.append(Alert(name, text))
            elif math.log10(steps).is_integer():
                more = "" if steps == 1 else f" (for {steps} steps in a row)"
                told.append(Alert(name, text + more))
        return told

    def firing(self, metrics: Record) -> Mapping[str, str]:
        """Returns the text of each alert that fires in a training step, and remembers the step."""
        self._history.append({name: metrics[name] for name in _READ if name in metrics})
        history = tuple(self._history)
        texts = {rule.name: rule.check(history) for rule in RULES}
        return {name: text for name, text in texts.items() if text is not None}

    @property
    def active(self) -> frozenset[str]:
        """The names of the alerts that fired in the last step."""
        return frozenset(self._in_a_row)


def run_signs(records: Sequence[Record]) -> tuple[str, ...]:
    """Returns the warning signs of a whole run, one line each, for its summary."""
    steps = [record for record in records if record[STEP] > 0]
    watch = Watch()
    fired = Counter(name for step in steps for name in watch.firing(step))
    untrained = sum(step.get(TRAINED_TOKENS) == 0 for step in steps)
    failed, total = _sum(steps, "rollout/num_failed"), _sum(steps, "rollout/num_trajectories")
    unknown, skipped = _sum(steps, "tool/unknown"), _sum(steps, "actor/skipped_updates")
    held_out = _sum(records, "val/num_failed")
    of = f"of {len(steps)} steps"
    alerts = {
        f"{r.said} in {fired[r.name]} {of}": fired[r.name] for r in RULES if r.name != "failed"
    }
    lines = {
        f"nothing was trained in {untrained} {of}": untrained,
        **alerts,
        f"{failed:.0f} of {total:.0f} trajectories failed ({failed / (total or 1):.0%})": failed,
        f"{held_out:.0f} trajectories of validations failed": held_out,
        f"the model called unknown tools {unknown:.0f} times": unknown,
        f"{skipped:.0f} updates were skipped": skipped,
    }
    return tuple(line for line, count in lines.items() if count)


def _sum(records: Sequence[Record], name: str) -> float:
    return sum(r[name] for r in records if name in r and math.isfinite(r[name]))
