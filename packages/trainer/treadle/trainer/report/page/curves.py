"""The curves of a run as one picture: reward, tool-call rate, held-out reward, and time by phase.

Invariant: only the metrics are drawn; a panel without data is labelled so. Each step is a faint
point, the line is the running mean. Drawn off screen; takes about a second and loads matplotlib.
"""

from __future__ import annotations

import colorsys
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from treadle.trainer.report.metrics import (
    REWARD,
    ROLLOUT_S,
    STEP,
    STEP_S,
    TOOL_RATE,
    TRAIN_LOSS,
    TRAIN_S,
    VAL_ACCURACY,
    VAL_LOSS,
    VAL_REWARD,
    VAL_TOOL_RATE,
    Record,
)
from treadle.trainer.report.summary import phase_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Colour = tuple[float, float, float]
"""Red, green and blue, 0 to 1."""

# Degrees. Those that share a panel are far apart; any other name gets one from its checksum.
_HUES: Final = MappingProxyType(
    {
        REWARD: 212,
        TOOL_RATE: 22,
        VAL_REWARD: 145,
        VAL_ACCURACY: 165,
        VAL_TOOL_RATE: 50,
        ROLLOUT_S: 212,
        TRAIN_S: 24,
        "time/sync_s": 145,
        "time/validate_s": 280,
        "time/save_s": 52,
        "time/release_s": 185,
    }
)
_INK, _FAINT, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_REST: Final = (0.8, 0.82, 0.85)
_MAX_BARS: Final = 40
"""Beyond, the phases are areas: bars would be hairlines, and take 8 s per thousand steps."""


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Returns the mean of each value and of up to `window - 1` before it; [N] to [N]."""
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def draw_curves(records: Sequence[Record], path: Path, *, title: str) -> None:
    """Draws the curves of `records` into the PNG file `path`.

    Raises:
        OSError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, hspace=0.04, wspace=0.04)
    figure = Figure(figsize=(12, 7.2), dpi=120, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.012, ha="left", fontsize=15, fontweight="bold", color=_INK)
    ((reward, tool), (validation, phases)) = figure.subplots(2, 2, sharex=False)
    if any(TRAIN_LOSS in record for record in records):
        _draw_line(reward, records, TRAIN_LOSS, "Loss of fine-tuning, nats per token")
        _draw_line(tool, records, "train/grad_norm", "Norm of the gradient")
    else:
        _draw_line(reward, records, REWARD, "Reward, mean per step")
        _draw_line(tool, records, TOOL_RATE, "Tool-call rate, training", share=True)
    _draw_validation(validation, records)
    _draw_phases(phases, records)
    for axes in (reward, tool, validation, phases):
        _style(axes, records)
    figure.savefig(path, format="png")


def _rgb(name: str) -> Colour:
    """Returns the colour of a metric, which depends on its name alone."""
    hue = _HUES.get(name, zlib.crc32(name.encode(errors="replace")) % 360)
    return colorsys.hls_to_rgb(hue / 360, 0.45, 0.5)


def _points(records: Sequence[Record], name: str) -> tuple[list[float], list[float]]:
    found = [(r[STEP], r[name]) for r in records if name in r and math.isfinite(r[name])]
    return [step for step, _ in found], [value for _, value in found]


def _draw_line(
    axes: Axes,
    records: Sequence[Record],
    name: str,
    heading: str,
    *,
    share: bool = False,
) -> None:
    axes.set_title(heading)
    steps, values = _points([record for record in records if record[STEP] > 0], name)
    if not values:
        _say_empty(axes)
        return
    colour = _rgb(name)
    smooth = running_mean(values, max(1, len(values) // 12))
    axes.plot(steps, values, "o", markersize=3, color=colour, alpha=0.35, markeredgewidth=0)
    axes.plot(steps, smooth, "-", linewidth=2.2, color=colour)
    _label_end(axes, steps[-1], smooth[-1], colour, share=share)
    if share:
        axes.set_ylim(-0.03, 1.06)
        _percent(axes)


def _draw_validation(axes: Axes, records: Sequence[Record]) -> None:
    axes.set_title("Held-out rows")
    drawn = False
    for name, label in (
        (VAL_LOSS, "loss"),
        (VAL_REWARD, "reward"),
        (VAL_ACCURACY, "accuracy"),
        (VAL_TOOL_RATE, "tool-call rate"),
    ):
        steps, values = _points(records, name)
        # Where the reward is the accuracy, one line is enough.
        if not values or (name == VAL_ACCURACY and values == _points(records, VAL_REWARD)[1]):
            continue
        drawn = True
        colour = _rgb(name)
        style = "--o" if name == VAL_TOOL_RATE else "-o"
        axes.plot(steps, values, style, linewidth=2, markersize=4.5, color=colour, label=label)
        if name != VAL_TOOL_RATE:
            _label_end(axes, steps[-1], values[-1], colour, share=False)
    if not drawn:
        _say_empty(axes)
        return
    axes.legend(loc="best", frameon=False, labelcolor=_INK)


def _draw_phases(axes: Axes, records: Sequence[Record]) -> None:
    axes.set_title("Seconds per step, by phase")
    timed = [r for r in records if r[STEP] > 0 and math.isfinite(r.get(STEP_S, math.nan))]
    totals: dict[str, float] = {}
    for record in timed:
        for phase, value in phase_seconds(record).items():
            totals[phase] = totals.get(phase, 0.0) + value
    if not totals:
        _say_empty(axes)
        return
    names = sorted(totals, key=lambda phase: -totals[phase])
    steps = [record[STEP] for record in timed]
    layers = [[phase_seconds(record).get(name, 0.0) for record in timed] for name in names]
    known = [sum(column) for column in zip(*layers, strict=True)]
    layers.append([max(0.0, r[STEP_S] - k) for r, k in zip(timed, known, strict=True)])
    colours = [*(_rgb(f"time/{name}_s") for name in names), _REST]
    labels = [*names, "other"]
    if len(steps) > _MAX_BARS:
        axes.stackplot(steps, layers, labels=labels, colors=colours, step="mid", linewidth=0)
    else:
        bottom = [0.0] * len(steps)
        for name, layer, colour in zip(labels, layers, colours, strict=True):
            axes.bar(steps, layer, 0.85, bottom=bottom, color=colour, label=name, linewidth=0)
            bottom = [b + v for b, v in zip(bottom, layer, strict=True)]
    axes.set_ylim(0, max(map(sum, zip(*layers, strict=True))) * 1.22 or 1.0)
    axes.legend(loc="upper center", ncols=4, frameon=False, labelcolor=_INK, fontsize=8)


def _label_end(axes: Axes, x: float, y: float, colour: Colour, *, share: bool) -> None:
    axes.annotate(
        f"{y:.1%}" if share else f"{y:.2f}",
        (x, y),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        color=colour,
        fontweight="bold",
        annotation_clip=False,
    )


def _percent(axes: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))


def _say_empty(axes: Axes) -> None:
    axes.text(
        0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=_FAINT
    )


def _style(axes: Axes, records: Sequence[Record]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.title.set(fontsize=11, color=_INK, ha="left", position=(0.0, 1.0))
    axes.set_xlabel("step", color=_FAINT, fontsize=9, loc="right")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlim(-0.5, max([record[STEP] for record in records], default=1) + 0.9)
    axes.grid(axis="y", color=_GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_FAINT, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
