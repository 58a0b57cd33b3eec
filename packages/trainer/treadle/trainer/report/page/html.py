"""The report of a run: one self-contained HTML file of bounded size.

Invariant: the file refers to nothing outside itself (pictures, styles and script are inline), and
every text of the run is escaped: a model can write markup, which must be shown, not executed. What
is left out for its size is counted in the page. The layout is in `report.html.j2`; this module
decides what is shown.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from treadle.trainer.report.logged_groups import Line, LoggedGroup, LoggedGroups, thin_out
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
    TRAIN_LOSS,
    TRAIN_S,
    VAL_ACCURACY,
    VAL_LOSS,
    VAL_REWARD,
    VAL_TOOL_RATE,
    Record,
)
from treadle.trainer.report.page.charts import MAX_PANELS, MORE, make_panels
from treadle.trainer.report.status import Status
from treadle.trainer.report.summary import Summary, summary_rows

MAX_TRAJECTORIES = 300
MAX_CHARACTERS = 4_000_000
"""Maximum for all trajectories; markup and escaped characters come on top."""
_MAX_STEPS = 500
_MAX_NOTES = 200
_PIECE = 200
"""Characters that a piece of a trajectory costs beside its text: there may be many empty ones."""
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
    ("with signal", "groups/with_signal", "{:.0%}"),
    ("stragglers", "groups/stragglers", "{:.0f}"),
    ("stalled", "findings/stalled", "{:.0f}"),
    ("drifted turns", "drift/sampled", "{:.0f}"),
    ("loss", "actor/loss", "{:.2e}"),
    ("loss", TRAIN_LOSS, "{:.4f}"),
    ("held-out loss", VAL_LOSS, "{:.4f}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("gradient", "actor/grad_norm", "{:.2e}"),
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


def render_html(
    *,
    title: str,
    run_dir: Path,
    status: Status,
    summary: Summary,
    records: Sequence[Record],
    logged: LoggedGroups,
    notes: Sequence[tuple[int, str]],
    config: Mapping[str, object],
) -> str:
    """Returns the report.

    Args:
        records: The lines of the metrics log, for the curves and the table of steps.
        notes: What the run said about itself: (step, text).
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = _number
    environment.filters["json"] = json.dumps
    source = resources.files("treadle.trainer.report.page").joinpath("report.html.j2")
    columns = [column for column in _COLUMNS if any(column[1] in record for record in records)]
    num_shown = sum(len(group.lines) for group in logged.groups)
    share = MAX_CHARACTERS // max(1, num_shown)
    newest_first = sorted(logged.groups, key=lambda group: (-group.step, group.phase))
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        title=title,
        status=status,
        written=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        last_step=max((int(record[STEP]) for record in records), default=None),
        summary=summary_rows(summary, run_dir),
        notes=notes[-_MAX_NOTES:],
        num_notes=len(notes),
        sections=make_panels(records),
        more=MORE,
        max_panels=MAX_PANELS,
        columns=columns,
        steps=[
            [_cell(record, column) for column in columns]
            for record in thin_out(records, _MAX_STEPS)
        ],
        num_records=len(records),
        config=flatten(config),
        groups=[_group(group, share) for group in newest_first],
        logged_steps=sorted({group.step for group in logged.groups}),
        num_shown=num_shown,
        logged=logged,
        max_trajectories=MAX_TRAJECTORIES,
        max_characters=MAX_CHARACTERS,
    )


def flatten(config: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Returns the leaves of a nested mapping as (dotted key, text), in order."""
    leaves: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            leaves += flatten(value, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", "null" if value is None else str(value)))
    return leaves


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


class Allowance:
    """The characters that may still be shown of something.

    Attributes:
        is_used_up: Whether anything was left out.
    """

    def __init__(self, characters: int) -> None:
        self._left = characters
        self.is_used_up = False

    def take(self, text: str) -> str:
        """Returns as much of the text as may be shown."""
        room = max(0, self._left - _PIECE)
        shown = text[:room]
        self.is_used_up |= self._left < _PIECE or len(shown) < len(text)
        self._left = room - len(shown)
        return shown


def _group(group: LoggedGroup, share: int) -> dict[str, Any]:
    lines = group.lines
    rewards = [line["reward"] for line in lines if _is_number(line.get("reward"))]
    question = next((m["content"] for m in lines[0]["messages"] if m["role"] == "user"), "")
    return {
        "step": group.step,
        "phase": group.phase,
        "task_id": group.task_id,
        "data_source": lines[0].get("data_source"),
        "ground_truth": lines[0].get("ground_truth"),
        "question": str(question)[:300],
        "mean": sum(rewards) / len(rewards) if rewards else None,
        "spread": max(rewards) - min(rewards) if rewards else 0.0,
        "length": max(_length(line) for line in lines),
        "trajectories": [
            _trajectory(line, share)
            for line in sorted(lines, key=lambda line: int(line["rollout_index"]))
        ],
    }


def _trajectory(line: Line, share: int) -> dict[str, Any]:
    """Returns what the template shows of one; half of its share is kept for the tokens."""
    said, sampled = Allowance(share // 2), Allowance(share - share // 2)
    messages: list[tuple[str, str, list[str]]] = []
    for message in [*_failure_and_findings(line), *line["messages"]]:
        if said.is_used_up:
            break
        name = said.take(str(message.get("name") or ""))
        messages.append((message["role"], name, [said.take(text) for text in _texts(message)]))
    samples: list[tuple[int, list[tuple[Mapping[str, Any], str]]]] = []
    for sample in line.get("samples") or []:
        spans: list[tuple[Mapping[str, Any], str]] = []
        for span in sample["spans"]:
            if sampled.is_used_up:
                break
            spans.append((span, sampled.take(_span_text(span))))
        samples.append((sample["num_tokens"], spans))
        if sampled.is_used_up:
            break
    error = line.get("error")
    reward = line.get("reward")
    return {
        "rollout_index": line["rollout_index"],
        "stop": line["stop"],
        "error": error,
        "reward": reward,
        "advantage": line.get("advantage"),
        "outcome": "none" if error else "high" if reward is not None and reward > 0 else "low",
        "num_turns": line.get("num_turns"),
        "length": _length(line),
        "messages": messages,
        "samples": samples,
        "bars": trace_bars(line)[: max(10, share // (10 * _PIECE))],
        "metrics": line.get("metrics") or {},
        "is_cut": said.is_used_up or sampled.is_used_up,
    }


def _failure_and_findings(line: Line) -> list[dict[str, Any]]:
    """Returns what was found and what failed, shown as messages."""
    found = [
        {"role": str(finding["kind"]).replace("_", " "), "content": finding["text"]}
        for finding in line.get("findings") or []
    ]
    failed = [
        {"role": role, "content": line[role]} for role in ("error", "traceback") if line.get(role)
    ]
    return [*failed, *found]


def _texts(message: Mapping[str, Any]) -> list[str]:
    calls = [
        f"{call['name']}("
        + ", ".join(
            f"{key}={json.dumps(value, ensure_ascii=False)}"
            for key, value in call["arguments"].items()
        )
        + ")"
        for call in message.get("tool_calls") or []
    ]
    texts = [message.get("reasoning"), message.get("content"), *calls]
    return [str(text) for text in texts if text]


def _span_text(span: Mapping[str, Any]) -> str:
    if span["text"] is not None:
        return str(span["text"])
    return f" {span['origin']}: {span['stop'] - span['start']} tokens "


def _length(line: Line) -> int:
    return sum(sample["num_tokens"] for sample in line.get("samples") or [])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _cell(record: Record, column: tuple[str, str, str]) -> str:
    value = record.get(column[1], math.nan)
    return column[2].format(value) if math.isfinite(value) else ""


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
