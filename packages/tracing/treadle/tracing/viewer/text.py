"""Runs as plain text: curves in a line each, alerts, and trajectories as conversations.

Invariant: everything of a run is inert text; see `inert`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from treadle.tracing.inert import inert
from treadle.tracing.trajectories.run_directories import METRICS, name_runs
from treadle.tracing.viewer.metric_lines import read_lines

__all__ = ["conversation", "curves"]

_BARS: Final = "▁▂▃▄▅▆▇█"
_WIDTH: Final = 40
_ALERTS: Final = 3


def curves(directories: Sequence[Path]) -> str:
    """Returns a line for each metric of each run, sorted by metric, and the last alerts.

    Raises:
        NotARunError: A directory is none of a run.
    """
    lines, alerts = [], []
    for directory, name in name_runs(directories).items():
        series: dict[str, list[float]] = {}
        for values in read_lines(directory / METRICS)[0]:
            for metric, value in values.items():
                if value is not None and metric != "step":
                    series.setdefault(metric, []).append(value)
        for metric, found in series.items():
            ends = f"{found[0]:>10.4g} {found[-1]:>10.4g} {min(found):>10.4g} {max(found):>10.4g}"
            lines.append(f"{metric:<36} {name:<12} {ends}  {_sparkline(found)}")
        log = directory / "alerts.jsonl"
        if log.exists():
            last = log.read_text("utf-8", "replace").splitlines()[-_ALERTS:]
            alerts += [f"{name}: {line}" for line in last]
    ends = f"{'first':>10} {'last':>10} {'least':>10} {'most':>10}"
    head = f"{'metric':<36} {'run':<12} {ends}  by step"
    return "".join(f"{inert(line)}\n" for line in (head, *sorted(lines), *alerts))


def conversation(trajectory: Mapping[str, Any]) -> str:
    """Returns a trajectory: its numbers, its findings, its messages, its error.

    Args:
        trajectory: All columns of one row.
    """
    return "".join(f"{inert(line)}\n" for line in _lines(trajectory))


def _sparkline(values: Sequence[float]) -> str:
    """Returns the values as bars; a long series by the means of equal parts."""
    size = -(-len(values) // _WIDTH)
    parts = [values[at : at + size] for at in range(0, len(values), size)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    return "".join(_BARS[round((mean - low) / (high - low or 1.0) * 7)] for mean in means)


def _lines(trajectory: Mapping[str, Any]) -> Iterator[str]:
    yield "step {step}  {phase}  {task_id}  rollout {rollout_index}".format_map(trajectory)
    names = ("reward", "advantage", "stop", "answer", "ground_truth")
    shown = (*names, "num_turns", "num_sampled_tokens", "duration_s")
    yield "   ".join(f"{name} {_short(trajectory[name])}" for name in shown)
    for finding in trajectory["findings"]:
        yield f"{finding['kind']}: {finding['text']}"
    for message in json.loads(trajectory["messages"]):
        yield f"\n[{message.get('role')}] {message.get('name') or ''}".rstrip()
        yield from _parts(message)
    for name in ("error", "traceback"):
        if trajectory[name] is not None:
            yield f"\n{name}: {trajectory[name]}"


def _short(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _parts(message: Mapping[str, Any]) -> Iterator[str]:
    if reasoning := message.get("reasoning"):
        yield f"(reasoning) {reasoning}"
    for image in message.get("images") or ():
        yield f"(image) {image}"
    content = message.get("content")
    if content:
        yield content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    for call in message.get("tool_calls") or ():
        yield f"-> {call.get('name')}({json.dumps(call.get('arguments'), ensure_ascii=False)})"
