"""The report of a run: one self-contained HTML file.

Invariant: the file refers to nothing outside itself (pictures, styles and script are inline), and
every text of the run is escaped: a model can write markup, which must be shown, not executed. The
layout is in `report.html.j2`; this module decides what is shown.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from treadle.trainer.report.metrics import (
    KL,
    MISMATCH,
    REWARD,
    ROLLOUT_S,
    SAMPLED_TOKENS,
    SERVERS_LOST,
    STALE_TOKENS,
    STEP,
    STEP_S,
    TOOL_RATE,
    TRAIN_S,
    VAL_ACCURACY,
    VAL_REWARD,
    VAL_TOOL_RATE,
    Record,
)
from treadle.trainer.report.summary import Summary, summary_rows

_MAX_TRAJECTORIES = 300
_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("step", STEP, "{:.0f}"),
    ("reward", REWARD, "{:.3f}"),
    ("tool rate", TOOL_RATE, "{:.1%}"),
    ("held-out reward", VAL_REWARD, "{:.3f}"),
    ("held-out accuracy", VAL_ACCURACY, "{:.1%}"),
    ("held-out tool rate", VAL_TOOL_RATE, "{:.1%}"),
    ("turns", "rollout/turns", "{:.2f}"),
    ("response tokens", "rollout/response_tokens", "{:.1f}"),
    ("sampled tokens", SAMPLED_TOKENS, "{:,.0f}"),
    ("failed", "rollout/num_failed", "{:.0f}"),
    ("stragglers", "groups/stragglers", "{:.0f}"),
    ("stalled", "findings/stalled", "{:.0f}"),
    ("drifted turns", "drift/sampled", "{:.0f}"),
    ("log-prob diff", f"{MISMATCH}_mean", "{:.1e}"),
    ("p99", f"{MISMATCH}_p99", "{:.1e}"),
    ("max", f"{MISMATCH}_max", "{:.1e}"),
    ("KL", KL, "{:.1e}"),
    ("older weights", STALE_TOKENS, "{:.1%}"),
    ("servers lost", SERVERS_LOST, "{:.0f}"),
    ("rollout s", ROLLOUT_S, "{:.2f}"),
    ("train s", TRAIN_S, "{:.2f}"),
    ("step s", STEP_S, "{:.2f}"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceBar:
    """A span in the timeline of a trajectory: its place in percent of the whole."""

    name: str
    left: float
    width: float
    milliseconds: float
    error: str | None


def write_html(
    path: Path,
    *,
    title: str,
    run_dir: Path,
    summary: Summary,
    records: Sequence[Record],
    trajectories: Sequence[Mapping[str, object]],
    config: Mapping[str, object],
    curves: bytes,
) -> None:
    """Writes the report.

    Args:
        path: The file.
        title: Its heading.
        run_dir: Named in the summary.
        summary: Shown at the top.
        records: The lines of the metrics log, for the table of steps.
        trajectories: The lines of the trajectory log, the last of which are shown.
        config: The resolved configuration, nested.
        curves: A PNG picture.

    Raises:
        OSError: The file cannot be written.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = _number
    source = resources.files("treadle.trainer.report").joinpath("report.html.j2")
    shown = thin_out(trajectories, _MAX_TRAJECTORIES)
    page = environment.from_string(source.read_text(encoding="utf-8")).render(
        title=title,
        summary=summary_rows(summary, run_dir),
        curves=base64.b64encode(curves).decode(),
        columns=_shown_columns(records),
        steps=[[_cell(record, column) for column in _shown_columns(records)] for record in records],
        config=flatten(config),
        trajectories=[{**trajectory, "bars": trace_bars(trajectory)} for trajectory in shown],
        num_trajectories=len(trajectories),
    )
    path.write_text(page, encoding="utf-8", errors="replace")  # a lone surrogate is not text


def flatten(config: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Returns the leaves of a nested mapping as (dotted key, text), in order."""
    leaves: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            leaves += flatten(value, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", "null" if value is None else str(value)))
    return leaves


def thin_out(
    trajectories: Sequence[Mapping[str, object]], limit: int
) -> list[Mapping[str, object]]:
    """At most `limit` of them, evenly from the first to the last, in their order."""
    count = len(trajectories)
    if count <= limit:
        return list(trajectories)
    return [trajectories[i * (count - 1) // (limit - 1)] for i in range(limit)]


def trace_bars(trajectory: Mapping[str, object]) -> list[TraceBar]:
    """Returns the spans of a trajectory's record, placed between its first and last moment."""
    spans = trajectory.get("trace")
    if not isinstance(spans, list) or not spans:
        return []
    start = min(span["start_unix_ns"] for span in spans)
    stop = max(span["start_unix_ns"] + span["duration_ns"] for span in spans)
    whole = max(1, stop - start)
    return [
        TraceBar(
            name=span["name"],
            left=100 * (span["start_unix_ns"] - start) / whole,
            width=max(0.2, 100 * span["duration_ns"] / whole),
            milliseconds=span["duration_ns"] / 1e6,
            error=span["error"],
        )
        for span in spans
    ]


def _shown_columns(records: Sequence[Record]) -> list[tuple[str, str, str]]:
    """Returns the columns that at least one step has a value for."""
    return [column for column in _COLUMNS if any(column[1] in record for record in records)]


def _cell(record: Record, column: tuple[str, str, str]) -> str:
    value = record.get(column[1], math.nan)
    return column[2].format(value) if math.isfinite(value) else ""


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
