import json
from pathlib import Path
from typing import Any

import pytest

from treadle.tracing.trajectories import TrajectoryFiles, write_file
from treadle.tracing.trajectories.testing import make_row
from treadle.tracing.viewer import timeline
from treadle.tracing.viewer.timeline import CAUSES, read_timeline

_S = 1_000_000_000
_BEGIN = 1_700_000_000 * _S


def _span(
    name: str, start: float, stop: float, *, parent: str | None = None, **attributes: object
) -> dict[str, Any]:
    """Returns a span whose id is its name and start."""
    return {
        "name": name,
        "span_id": f"{name}@{start}",
        "parent_id": parent,
        "start_unix_ns": _BEGIN + round(start * _S),
        "duration_ns": round((stop - start) * _S),
        "attributes": json.dumps(attributes),
        "error": None,
    }


def _timeline(run: Path, *traces: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [make_row(1, "train", 1, i) | {"trace": trace} for i, trace in enumerate(traces)]
    write_file(run / "trajectories", step=1, phase="train", rows=rows)
    return read_timeline(run, TrajectoryFiles(run), 1, "train")


def _write_traces(path: Path, *spans: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    lines = [{**span, "attributes": json.loads(span["attributes"])} for span in spans]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"dropped": 3}\n{"na')


def test_seconds_are_counted_by_cause(tmp_path: Path) -> None:
    found = _timeline(
        tmp_path,
        [
            _span("trajectory", 0, 10),
            _span("generate", 1, 5, queue_s=1.5, paused_s=0.5),
            _span("tools", 5, 7),
            _span("tool", 5, 7, tool="python"),
            _span("tool", 5.5, 6.5, tool="python"),  # Beside the other: no time of its own.
            _span("reward", 8, 9),
        ],
    )
    assert found["totals"] == pytest.approx(
        dict.fromkeys(CAUSES, 0.0)
        | {"generate": 2, "queue": 1.5, "paused": 0.5, "tool": 2, "reward": 1, "other": 3}
    )
    assert {"name": "tool", "label": "python"}.items() <= found["bars"][0]["spans"][2].items()


def test_waits_of_requests_that_overlap_are_no_longer_than_their_union(tmp_path: Path) -> None:
    generating = [_span("generate", 0, 2, queue_s=2.0), _span("generate", 0.0, 2, queue_s=1.0)]
    (bar,) = _timeline(tmp_path, [_span("trajectory", 0, 2), *generating])["bars"]
    assert bar["causes"]["queue"] == pytest.approx(2)
    assert bar["causes"]["generate"] == pytest.approx(0)


def test_bars_are_in_the_order_of_their_start(tmp_path: Path) -> None:
    found = _timeline(tmp_path, [_span("trajectory", 3, 4)], [], [_span("trajectory", 1, 9)])
    assert [(bar["start_s"], bar["duration_s"]) for bar in found["bars"]] == [(0, 8), (2, 1)]
    assert found["ends_s"] == [3, 8]
    assert found["without_trace"] == 1


@pytest.mark.parametrize("file", ["traces.jsonl", "traces/server-0.jsonl"])
def test_server_spans_are_found_by_their_client(tmp_path: Path, file: str) -> None:
    client = _span("generate", 0, 4)
    _write_traces(
        tmp_path / file,
        _span("queue", 1, 2, parent="serve@0.5"),  # Written before the call that it is a part of.
        _span("decode", 2, 3, parent="serve@0.5"),
        _span("serve", 0.5, 3.5, parent=client["span_id"]),
        _span("decode", 2, 3, parent="of another step"),
        _span("update", 5, 6, step=1, model="policy"),
        _span("update", 7, 8, step=2, model="policy"),
    )
    found = _timeline(tmp_path, [_span("trajectory", 0, 4), client])
    served = [span for span in found["bars"][0]["spans"] if span.get("server")]
    assert [(span["name"], span["start_s"]) for span in served] == [("queue", 1), ("decode", 2)]
    assert found["has_server_spans"]
    assert [(span["label"], span["start_s"]) for span in found["step_spans"]] == [("policy", 5)]


def test_traces_that_are_too_large_are_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "_MAX_TRACE_BYTES", 10)
    _write_traces(tmp_path / "traces.jsonl", _span("update", 5, 6, step=1))
    found = _timeline(tmp_path, [_span("trajectory", 0, 4)])
    assert found["step_spans"] == []
    assert "are not searched for server spans" in found["note"]
