"""The summary of a run: what it reached and where its time went, computed from its metrics alone.

Invariant: a number that the metrics do not hold is None and shown as a dash, never as zero. Pure;
nobody waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle.trainer.report.metrics import (
    ACCURACY,
    REWARD,
    ROLLOUT_S,
    SAMPLED_TOKENS,
    STEP,
    STEP_S,
    TOOL_RATE,
    TRAIN_S,
    TRAINED_TOKENS,
    VAL_TOOL_RATE,
    Record,
)

_WINDOW = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A number at the start and at the end of a run; None where it was not measured."""

    start: float | None
    end: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run reached.

    Attributes:
        num_steps: Training steps in the metrics.
        window: Steps that the start and end of `reward` and `tool_rate` are the mean of.
        reward: Mean reward of the training trajectories.
        tool_rate: Share of the training trajectories, 0 to 1, that called a tool.
        accuracy: First and last validation.
        val_tool_rate: Share of the validation trajectories that called a tool, likewise.
        rollout_tokens_per_s: Sampled tokens over the seconds of the rollout phases.
        train_tokens_per_s: Trained tokens over the seconds of the training phases.
        total_s: Seconds of all steps and of the validation before them.
        phases_s: Phase to seconds, the longest first; "other" is what no phase accounts for.
    """

    num_steps: int
    window: int
    reward: Change
    tool_rate: Change
    accuracy: Change
    val_tool_rate: Change
    rollout_tokens_per_s: float | None
    train_tokens_per_s: float | None
    total_s: float
    phases_s: Mapping[str, float]


def summarize(records: Sequence[Record]) -> Summary:
    """Sum up the lines of a metrics log, in their order."""
    steps = [record for record in records if record[STEP] > 0]
    window = max(1, min(_WINDOW, len(steps) // 2))
    return Summary(
        num_steps=len(steps),
        window=window,
        reward=_means(steps, REWARD, window),
        tool_rate=_means(steps, TOOL_RATE, window),
        accuracy=_means(records, ACCURACY, 1),
        val_tool_rate=_means(records, VAL_TOOL_RATE, 1),
        rollout_tokens_per_s=_rate(steps, SAMPLED_TOKENS, ROLLOUT_S),
        train_tokens_per_s=_rate(steps, TRAINED_TOKENS, TRAIN_S),
        total_s=sum(map(_duration, records)),
        phases_s=_phases(records),
    )


def summary_rows(summary: Summary, run_dir: Path) -> tuple[tuple[str, str, str], ...]:
    """The summary as rows of (what, at the start, at the end); the second is "" for one number."""
    per_step = f"mean of {summary.window} step{'s' if summary.window > 1 else ''}"
    shares = " · ".join(
        f"{name} {seconds / summary.total_s:.0%}"
        for name, seconds in summary.phases_s.items()
        if summary.total_s and seconds / summary.total_s >= 0.005
    )
    return (
        ("", "start", "end"),
        (f"reward ({per_step})", _number(summary.reward.start), _number(summary.reward.end)),
        (
            f"tool-call rate ({per_step})",
            _share(summary.tool_rate.start),
            _share(summary.tool_rate.end),
        ),
        ("held-out accuracy", _share(summary.accuracy.start), _share(summary.accuracy.end)),
        (
            "held-out tool-call rate",
            _share(summary.val_tool_rate.start),
            _share(summary.val_tool_rate.end),
        ),
        ("rollout", "", _per_second(summary.rollout_tokens_per_s)),
        ("training", "", _per_second(summary.train_tokens_per_s)),
        ("time", "", f"{format_seconds(summary.total_s)} for {summary.num_steps} steps"),
        ("where it went", "", shares or "-"),
        ("run directory", "", str(run_dir)),
    )


def format_seconds(seconds: float) -> str:
    """9.4 s, 3 min 05 s, 2 h 07 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def phase_of(name: str) -> str | None:
    """The phase that the metric `name` gives the seconds of, or None if it is something else."""
    if name == STEP_S or not (name.startswith("time/") and name.endswith("_s")):
        return None
    return name.removeprefix("time/").removesuffix("_s")


def phase_seconds(record: Record) -> dict[str, float]:
    """The seconds of each phase of one step."""
    return {
        phase: value
        for name, value in record.items()
        if (phase := phase_of(name)) is not None and math.isfinite(value)
    }


def _duration(record: Record) -> float:
    """Seconds of one step; the validation before training has phases and no duration."""
    total = record.get(STEP_S, math.nan)
    return total if math.isfinite(total) else sum(phase_seconds(record).values())


def _phases(records: Sequence[Record]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for record in records:
        for phase, value in phase_seconds(record).items():
            seconds[phase] = seconds.get(phase, 0.0) + value
    other = sum(map(_duration, records)) - sum(seconds.values())
    # Below a millisecond it is the rounding of the sum.
    if other > 1e-3:
        seconds["other"] = other
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _values(records: Sequence[Record], name: str) -> list[float]:
    return [r[name] for r in records if name in r and math.isfinite(r[name])]


def _means(records: Sequence[Record], name: str, window: int) -> Change:
    values = _values(records, name)
    if not values:
        return Change(start=None, end=None)
    first, last = values[:window], values[-window:]
    return Change(start=sum(first) / len(first), end=sum(last) / len(last))


def _rate(records: Sequence[Record], tokens: str, seconds: str) -> float | None:
    total_s = sum(_values(records, seconds))
    counts = _values(records, tokens)
    return sum(counts) / total_s if counts and total_s > 0 else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _per_second(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} tokens/s"
