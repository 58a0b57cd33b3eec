"""The curves of the report: metrics -> panels of polylines, in the coordinates of an SVG picture.

Invariant: axes follow the data; a series that no step has is in no panel, and each metric of a run
is in exactly one, except the bounds of intervals, which are in none. A long series is drawn by the
means of equal parts. All functions are pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from treadle.trainer.report.metrics import RANK_TIME, SERVER_TIME, STEP, Record
from treadle.trainer.report.page.colours import hue
from treadle.trainer.time_shares.ranks import RANK_CAUSES
from treadle.trainer.time_shares.server_causes import SERVER_CAUSES

WIDTH, HEIGHT = 360, 180
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 22
MAX_POINTS = 300
MAX_PANELS = 100
MORE = "All other metrics"

# Section, heading of the panel, names of its metrics.
_PANELS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Reward", "Reward, training", ("reward/mean", "reward/min", "reward/max")),
    ("Reward", "Reward, held-out", ("val/reward", "val/reward/*")),
    ("Reward", "Accuracy, held-out", ("val/accuracy", "val/accuracy/*")),
    ("Reward", "Reward of k samples, held-out", ("val/*/reward/*@*",)),
    ("Reward", "Accuracy of k samples, held-out", ("val/*/accuracy/*@*",)),
    ("Reward", "Tool-call rate", ("tool/call_rate", "val/tool_call_rate")),
    ("Loss", "Loss", ("actor/loss",)),
    ("Loss", "Loss, nats per token", ("train/loss", "val/loss")),
    ("Loss", "Policy-gradient term", ("actor/pg_loss",)),
    ("Loss", "Entropy, nats per token", ("actor/entropy",)),
    ("Loss", "KL, nats per token", ("actor/ppo_kl", "rollout/kl", "actor/kl_loss")),
    ("Loss", "Norm of the gradient", ("actor/grad_norm", "train/grad_norm")),
    ("Loss", "Share of tokens clipped", ("actor/pg_clipfrac", "actor/pg_clipfrac_lower")),
    ("Loss", "Learning rate", ("actor/lr", "train/lr")),
    ("Lengths and groups", "Tokens of a response", ("rollout/response_tokens",)),
    ("Lengths and groups", "Turns", ("rollout/turns",)),
    ("Lengths and groups", "Share of groups with signal", ("groups/with_signal",)),
    (
        "Lengths and groups",
        "Failed trajectories, dropped groups",
        ("rollout/num_failed", "val/num_failed", "groups/dropped"),
    ),
    ("Lengths and groups", "Share of trajectories by end", ("stop/*",)),
    ("Time", "Seconds", ("time/*_s",)),
    ("Time", "What the servers' time went to", tuple(f"{SERVER_TIME}{c}" for c in SERVER_CAUSES)),
    ("Time", "What the policy ranks' time went to", tuple(f"{RANK_TIME}{c}" for c in RANK_CAUSES)),
)


# Shares of one whole: drawn on top of each other. The order is that of the names.
_STACKED = (f"{SERVER_TIME}*", f"{RANK_TIME}*")
# They are in the metrics log: as curves they would hide those of the means.
_BOUNDS = ("val/*@*/low", "val/*@*/high")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One metric of a panel.

    Attributes:
        steps: Where it was measured; of an equal part, the last step.
        values: One per step, or the mean of a part.
        faint: Points of the values, as `x,y x,y`.
        bold: Points of their running mean.
        dots: The points again where they are too few for a line.
        area: Of a series on top of others: the outline of its bars. Its `faint` is their upper end.
    """

    name: str
    hue: int
    steps: tuple[int, ...]
    values: tuple[float, ...]
    faint: str
    bold: str
    dots: tuple[tuple[float, float], ...]
    area: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture."""

    title: str
    series: tuple[Series, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]


def make_panels(records: Sequence[Record]) -> dict[str, list[Panel]]:
    """Returns the panels of a run by section; what no panel is made for is under `MORE`."""
    left = sorted({name for record in records for name in record} - {STEP})
    left = [name for name in left if not any(fnmatchcase(name, bound) for bound in _BOUNDS)]
    measured = {name: points for name in left if (points := _points(records, name))}
    left = list(measured)
    sections: dict[str, list[Panel]] = {}

    def add(section: str, title: str, names: Sequence[str]) -> None:
        stacked = any(fnmatchcase(names[0], pattern) for pattern in _STACKED)
        make = _stacked_panel if stacked else _panel
        panel = make(title, [(name, *measured[name]) for name in names])
        sections.setdefault(section, []).append(panel)

    for section, title, patterns in _PANELS:
        names = [n for p in patterns for n in left if fnmatchcase(n, p)]
        if names:
            left = [name for name in left if name not in names]
            add(section, title, names)
    own = sorted(left, key=lambda name: not name.startswith("reward/"))
    for name in own[:MAX_PANELS]:
        add("Metrics of rewards" if name.startswith("reward/") else MORE, name, [name])
    return sections


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Returns the mean of each value and of up to `window - 1` before it; [N] to [N]."""
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def _points(
    records: Sequence[Record], name: str
) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
    found = [(int(r[STEP]), r[name]) for r in records if math.isfinite(r.get(name, math.nan))]
    if not found:
        return None
    size = math.ceil(len(found) / MAX_POINTS)
    parts = [found[start : start + size] for start in range(0, len(found), size)]
    steps = tuple(part[-1][0] for part in parts)
    return steps, tuple(sum(value for _, value in part) / len(part) for part in parts)


def _panel(title: str, measured: Sequence[tuple[str, tuple[int, ...], tuple[float, ...]]]) -> Panel:
    x_low, x_high = _range([step for _, steps, _ in measured for step in steps])
    y_low, y_high = _range([value for _, _, values in measured for value in values])

    def x_of(step: float) -> float:
        return LEFT + (step - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        return TOP + (y_high - value) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    def line(steps: Sequence[float], values: Sequence[float]) -> str:
        return " ".join(
            f"{x_of(step):.1f},{y_of(value):.1f}" for step, value in zip(steps, values, strict=True)
        )

    series = []
    for name, steps, values in measured:
        few = len(steps) <= 12
        smooth = values if few else running_mean(values, max(1, len(values) // 12))
        series.append(
            Series(
                name=name,
                hue=hue(name),
                steps=steps,
                values=values,
                faint=line(steps, values),
                bold=line(steps, smooth),
                dots=tuple(
                    (round(x_of(step), 1), round(y_of(value), 1))
                    for step, value in zip(steps, values, strict=True)
                )
                if few
                else (),
            )
        )
    return Panel(
        title=title,
        series=tuple(series),
        x_ticks=tuple((x_of(at), f"{at:.0f}") for at in _ticks(x_low, x_high, whole=True)),
        y_ticks=tuple((y_of(at), f"{at:.4g}") for at in _ticks(y_low, y_high)),
    )


def _stacked_panel(
    title: str, measured: Sequence[tuple[str, tuple[int, ...], tuple[float, ...]]]
) -> Panel:
    """Returns a panel with a bar per step: the series on top of each other, the first at the foot.

    Args:
        measured: Name, steps and values; all of them have the same steps.
    """
    steps = measured[0][1]
    edges = [(one + two) / 2 for one, two in itertools.pairwise(steps)]
    edges = [2 * steps[0] - edges[0], *edges, 2 * steps[-1] - edges[-1]] if edges else []
    edges = edges or [steps[0] - 0.5, steps[0] + 0.5]
    high = max(map(sum, zip(*(values for _, _, values in measured), strict=True))) or 1.0

    def x_of(step: float) -> float:
        return LEFT + (step - edges[0]) / (edges[-1] - edges[0]) * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        return TOP + (high - value) / high * (HEIGHT - TOP - BOTTOM)

    def outline(heights: Sequence[float]) -> list[str]:
        return [
            f"{x_of(edge):.1f},{y_of(height):.1f}"
            for (left, right), height in zip(itertools.pairwise(edges), heights, strict=True)
            for edge in (left, right)
        ]

    series = []
    foot: Sequence[float] = [0.0] * len(steps)
    for name, _, values in measured:
        head = [low + value for low, value in zip(foot, values, strict=True)]
        middles = zip(steps, head, strict=True)
        series.append(
            Series(
                name=name,
                hue=hue(name),
                steps=steps,
                values=values,
                faint=" ".join(f"{x_of(step):.1f},{y_of(value):.1f}" for step, value in middles),
                bold="",
                dots=(),
                area=" ".join((*outline(head), *reversed(outline(foot)))),
            )
        )
        foot = head
    return Panel(
        title=title,
        series=tuple(series),
        x_ticks=tuple((x_of(at), f"{at:.0f}") for at in _ticks(edges[0], edges[-1], whole=True)),
        y_ticks=tuple((y_of(at), f"{at:.4g}") for at in _ticks(0.0, high)),
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = 0.1 * abs(low) or 0.5
        return low - margin, high + margin
    return low, high


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    locator = MaxNLocator(nbins=4, integer=whole, steps=[1, 2, 2.5, 5, 10])
    return [float(at) for at in locator.tick_values(low, high) if low <= at <= high]
