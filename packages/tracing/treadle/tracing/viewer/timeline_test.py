import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.tracing.trajectories import TrajectoryFiles, write_file
from treadle.tracing.trajectories.testing import make_row
from treadle.tracing.viewer import timeline
from treadle.tracing.viewer.timeline import CAUSES, _seconds_by_cause, read_timeline

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
    path.write_text(
        "".join(f"{json.dumps(line)}\n" for line in lines)
        + '{"dropped": 3}\n{"name": "queue", "tra'
    )


def test_a_trajectorys_seconds_are_divided_among_causes(tmp_path: Path) -> None:
    found = _timeline(
        tmp_path,
        [
            _span("trajectory", 0, 12),
            _span("turn", 0, 6),
            _span("generate", 1, 6),
            _span("route", 1, 1.5),
            _span("queue", 1.5, 2),
            _span("prefill", 2, 2.5),
            _span("decode", 2.5, 5.5),
            _span("paused", 5, 5.5),  # A part of the decoding.
            _span("tools", 6, 8),
            _span("tool", 6, 8, tool="python"),
            _span("tool", 6.5, 7.5, tool="python"),  # Beside the other: no time of its own.
            _span("reward", 9, 11),
        ],
    )
    expected = {"paused": 0.5, "prefill": 0.5, "decode": 2.5, "queue": 1.0, "tool": 2.0}
    expected |= {"reward": 2.0, "generate": 0.5, "other": 3.0, "interaction": 0.0}
    assert found["totals"] == pytest.approx(expected)
    assert sum(found["totals"].values()) == pytest.approx(12)
    assert [span["label"] for span in found["bars"][0]["spans"] if span["name"] == "tool"] == [
        "python",
        "python",
    ]


@given(
    st.lists(
        st.tuples(st.sampled_from([*CAUSES, "turn"]), st.integers(0, 99), st.integers(0, 50)),
        max_size=12,
    )
)
def test_the_seconds_of_all_causes_are_the_time_of_the_trajectory(
    spans: list[tuple[str, int, int]],
) -> None:
    trace = [_span(name, start, start + length) for name, start, length in spans]
    seconds = _seconds_by_cause([_span("trajectory", 0, 149), *trace], 149 * _S)
    assert sum(seconds.values()) == pytest.approx(149)
    assert all(value >= 0 for value in seconds.values())


def test_bars_are_in_the_order_of_their_start(tmp_path: Path) -> None:
    found = _timeline(tmp_path, [_span("trajectory", 3, 4)], [], [_span("trajectory", 1, 9)])
    assert [(bar["start_s"], bar["duration_s"]) for bar in found["bars"]] == [(0, 8), (2, 1)]
    assert found["ends_s"] == [3, 8]
    assert found["without_trace"] == 1


@pytest.mark.parametrize("file", ["traces.jsonl", "traces/server-0.jsonl"])
def test_server_spans_are_found_by_their_client(tmp_path: Path, file: str) -> None:
    client = _span("generate", 0, 4)
    told = _span("decode", 3, 4, parent=client["span_id"])  # By the driver, at another place.
    _write_traces(
        tmp_path / file,
        _span(
            "queue", 1, 2, parent="server.generate@0.5"
        ),  # Written before the call that it is a part of.
        _span("decode", 2, 3, parent="server.generate@0.5"),
        _span("server.generate", 0.5, 3.5, parent=client["span_id"]),
        _span("decode", 2, 3, parent="of another step"),
        _span("update", 5, 6, step=1, model="policy"),
        _span("update", 7, 8, step=2, model="policy"),
    )
    found = _timeline(tmp_path, [_span("trajectory", 0, 4), client, told])
    drawn = [(span["name"], span["start_s"]) for span in found["bars"][0]["spans"]]
    assert drawn == [("generate", 0), ("queue", 1), ("decode", 2)]
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
