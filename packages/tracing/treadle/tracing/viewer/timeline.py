"""Where the time of a step went: the spans of its trajectories, and what the servers did meanwhile.

Dataflow: the trajectory files have the spans of the driver; `traces.jsonl` and `traces/*.jsonl`, if
the run wrote them, have those of servers and of the step. A server's spans are found below the
client's `generate` span.

A trajectory's seconds are divided among causes: a moment that several of its spans share counts for
the first of `CAUSES`, and `other` is what none has. So they add up to its time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from treadle.tracing.trajectories import Filter, TrajectoryFiles
from treadle.tracing.trajectories.filter import Condition

__all__ = ["CAUSES", "read_timeline"]

CAUSES: Final = (
    *("paused", "prefill", "decode", "queue", "tool", "interaction", "reward", "generate", "other"),
)
"""The causes of a trajectory's time: waiting for new weights; reading prompts; sampling; waiting
for a server or a slot of its engine; tools; the simulated user; the reward; the rest of requests,
between driver and server; and everything else."""

_CAUSE_OF: Final = MappingProxyType(
    {
        **{cause: cause for cause in CAUSES if cause != "other"},
        "route": "queue",
        "tools": "tool",
    }
)
_SERVER_PHASES: Final = ("queue", "prefill", "decode", "paused")
_SERVER_CALL: Final = "server.generate"
_STEP_SPANS: Final = ("update", "weight_sync")
_READ: Final = tuple(
    f'{{"name": "{name}"'.encode() for name in (_SERVER_CALL, *_SERVER_PHASES, *_STEP_SPANS)
)
"""How lines begin that are parsed. The others are the most and the longest, with whole texts."""
_MAX_TRACE_BYTES: Final = 2 << 30
_COLUMNS: Final = ("task_id", "rollout_index", "reward", "stop", "error", "duration_s", "trace")

Span = Mapping[str, Any]


def read_timeline(
    run_dir: Path, trajectories: TrajectoryFiles, step: int, phase: str
) -> dict[str, Any]:
    """Returns the timeline of a step as plain data; times are seconds from its first span."""
    where = Filter((Condition("step", "=", float(step)), Condition("phase", "=", phase)))
    rows = trajectories.query(where, columns=_COLUMNS)
    begins = [span["start_unix_ns"] for row in rows for span in row["trace"]]
    begin = min(begins, default=0)
    asked = {s["span_id"]: s for row in rows for s in row["trace"] if s["name"] == "generate"}
    served, of_step, note = _read_traces(run_dir, asked, step)
    bars = [_bar(row, begin, served) for row in rows if row["trace"]]
    bars.sort(key=lambda bar: (bar["start_s"], bar["task_id"], bar["rollout_index"]))
    return {
        "step": step,
        "phase": phase,
        "causes": CAUSES,
        "bars": bars,
        "without_trace": len(rows) - len(bars),
        "totals": {cause: sum(bar["causes"][cause] for bar in bars) for cause in CAUSES},
        "ends_s": sorted(bar["start_s"] + bar["duration_s"] for bar in bars),
        "step_spans": [_placed(span, begin) for span in of_step],
        "has_server_spans": bool(served),
        "note": note,
    }


def _bar(row: Mapping[str, Any], begin: int, served: Mapping[str, list[Span]]) -> dict[str, Any]:
    trace: list[Span] = row["trace"]
    first = min(span["start_unix_ns"] for span in trace)
    last = max(span["start_unix_ns"] + span["duration_ns"] for span in trace)
    # The driver knows how long a request's phases took, and its server also when they were.
    spans = [
        _placed(span, begin)
        for span in trace
        if span["name"] != "trajectory"
        and not (span["name"] in _SERVER_PHASES and span["parent_id"] in served)
    ]
    spans += [
        {**_placed(below, begin), "server": True}
        for span in trace
        for below in served.get(span["span_id"], ())
    ]
    return {
        **{name: row[name] for name in ("task_id", "rollout_index", "reward", "stop", "error")},
        "start_s": (first - begin) / 1e9,
        "duration_s": (last - first) / 1e9,
        "causes": _seconds_by_cause(trace, last - first),
        "spans": spans,
    }


def _placed(span: Span, begin: int) -> dict[str, Any]:
    attributes = _attributes(span)
    label = attributes.get("tool") or attributes.get("model")
    return {
        "name": span["name"],
        "start_s": (span["start_unix_ns"] - begin) / 1e9,
        "duration_s": span["duration_ns"] / 1e9,
        "label": None if label is None else str(label),
        "tokens": attributes.get("tokens"),
        "error": span["error"] is not None,
    }


def _seconds_by_cause(trace: Iterable[Span], length_ns: int) -> dict[str, float]:
    found: dict[str, list[tuple[int, int]]] = {cause: [] for cause in CAUSES}
    for span in trace:
        cause = _CAUSE_OF.get(span["name"], "other")
        if cause != "other":
            start = span["start_unix_ns"]
            found[cause].append((start, start + span["duration_ns"]))
    seconds: dict[str, float] = {}
    intervals: list[tuple[int, int]] = []
    before = 0
    for cause in CAUSES:
        intervals += found[cause]
        covered = length_ns if cause == "other" else _covered(intervals)
        seconds[cause] = max(0, covered - before) / 1e9
        before = covered
    return seconds


def _covered(intervals: Iterable[tuple[int, int]]) -> int:
    """Returns the length of the union of intervals."""
    covered = end = 0
    for start, stop in sorted(intervals):
        covered += max(0, stop - max(start, end))
        end = max(end, stop)
    return covered


def _attributes(span: Span) -> Mapping[str, Any]:
    found = span["attributes"]
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (RecursionError, ValueError):
            found = {}
    return found if isinstance(found, dict) else {}


def _read_traces(
    run_dir: Path, asked: Mapping[str, Span], step: int
) -> tuple[dict[str, list[Span]], list[Span], str | None]:
    """Returns what servers did for each `generate` span, the spans of the step itself, and a note.

    A server's call is a child of the client's span, and its phases are children of the call.
    """
    files = [run_dir / "traces.jsonl", *sorted((run_dir / "traces").glob("*.jsonl"))]
    files = [path for path in files if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    if size > _MAX_TRACE_BYTES:
        return {}, [], f"the traces have {size >> 20} MiB and are not searched for server spans"
    calls: dict[str, str] = {}
    phases: list[Span] = []
    of_step: list[Span] = []
    for span in _spans(files):
        if span["name"] in _SERVER_PHASES:
            phases.append(span)
        elif span["name"] == _SERVER_CALL and span["parent_id"] in asked:
            calls[span["span_id"]] = span["parent_id"]
        elif span["name"] in _STEP_SPANS and _attributes(span).get("step") == step:
            of_step.append(span)
    served: dict[str, list[Span]] = {}
    for span in phases:
        client = calls.get(span["parent_id"])
        if client is not None:
            served.setdefault(client, []).append(span)
    return served, of_step, None


def _spans(files: Iterable[Path]) -> Iterator[Span]:
    """Yields the spans of trace files that a timeline needs."""
    for path in files:
        with path.open("rb") as lines:
            for line in lines:
                if not line.startswith(_READ):
                    continue
                try:
                    span = json.loads(line)
                except (RecursionError, ValueError):
                    continue  # The end of a file that is being written.
                if isinstance(span, dict) and span.keys() >= _KEYS:
                    yield span


_KEYS: Final = {
    "name",
    "span_id",
    "parent_id",
    "start_unix_ns",
    "duration_ns",
    "attributes",
    "error",
}
