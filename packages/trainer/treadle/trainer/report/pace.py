"""The pace of a run: estimates the time of its next steps from the earlier ones.

A step is expected to take the median of the last 100, without validations and checkpoints, so that
neither these nor one slow step change the estimate. The first step of a process is left out as soon
as there are others: engines and caches warm up in it. Validations and checkpoints are expected to
take their own medians, at the steps of the schedule; before the first of a kind, none is counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final, Self

from treadle.trainer.report.metrics import SAVE_S, STEP_S, VALIDATE_S, Record

if TYPE_CHECKING:
    from treadle.trainer.config.schema import StepsConfig

__all__ = ["Expected", "Pace", "expect"]

_WINDOW: Final = 100
"""Steps that count: completions get longer as a policy learns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The time that steps and the rest of the run are expected to take.

    Attributes:
        step_s: Seconds of a step without validation and checkpoint.
        left_s: Seconds to the end of the run, with both.
    """

    step_s: float
    left_s: float


def expect(
    records: Sequence[tuple[int, Record]],
    *,
    total_steps: int,
    val_every: int | None = None,
    save_every: int | None = None,
) -> Expected | None:
    """Returns the expected times after the last record; None before the first step has ended.

    Args:
        records: (step, its metrics) of this process, in order. Step 0 is a validation.
        total_steps: The last step of the run.
        val_every: Steps between validations; None: there is none. The last step has one too.
        save_every: Steps between checkpoints; None: after the last step only.
    """
    steps = [record for step, record in records if step > 0 and _has(record, STEP_S)]
    if not steps:
        return None
    step_s = median(
        max(0.0, record[STEP_S] - record.get(VALIDATE_S, 0.0) - record.get(SAVE_S, 0.0))
        for record in (steps[1:] or steps)[-_WINDOW:]
    )
    left = range(records[-1][0] + 1, total_steps + 1)
    validations = 0 if val_every is None else _due(left, val_every)
    extras = validations * _usual(records, VALIDATE_S)
    extras += _due(left, save_every or total_steps) * _usual(records, SAVE_S)
    return Expected(step_s=step_s, left_s=len(left) * step_s + extras)


def _due(left: range, every: int) -> int:
    return sum(step % every == 0 or step == left[-1] for step in left)


def _usual(records: Sequence[tuple[int, Record]], name: str) -> float:
    return median([record[name] for _, record in records if _has(record, name)] or [0.0])


def _has(record: Record, name: str) -> bool:
    return math.isfinite(record.get(name, math.nan))


class Pace:
    """Records the steps of a run as they end, and estimates the time left."""

    def __init__(
        self, *, total_steps: int, val_every: int | None = None, save_every: int | None = None
    ) -> None:
        """Args are those of `expect`."""
        self._schedule = (total_steps, val_every, save_every)
        self._records: list[tuple[int, Record]] = []

    @classmethod
    def of(cls, schedule: StepsConfig, *, total_steps: int) -> Self:
        """Returns the pace of a run with this schedule."""
        return cls(
            total_steps=total_steps,
            val_every=schedule.val_every,
            save_every=schedule.save_every,
        )

    def step_done(self, step: int, values: Record) -> Expected | None:
        """Records that step `step` has ended; returns the expected times."""
        total_steps, val_every, save_every = self._schedule
        times = {name: values[name] for name in (STEP_S, VALIDATE_S, SAVE_S) if name in values}
        self._records.append((step, times))
        return expect(
            self._records, total_steps=total_steps, val_every=val_every, save_every=save_every
        )
