import errno
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.tracing import (
    Deferred,
    FinishedSpan,
    JsonlSink,
    SinkReport,
    SpanError,
    jsonl,
    span,
    use_sink,
)
from treadle.tracing.span import freeze

HeldWriter = tuple[threading.Event, threading.Event]

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def make_span(name: str = "turn", **attributes: object) -> FinishedSpan:
    return FinishedSpan(
        name=name,
        trace_id="a" * 32,
        span_id="b" * 16,
        parent_id=None,
        start_unix_ns=1,
        duration_ns=2,
        attributes=MappingProxyType({key: freeze(value) for key, value in attributes.items()}),
        error=None,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def held_writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldWriter]:
    """Holds the writer at its first span until told to go on."""
    at_first, go_on = threading.Event(), threading.Event()
    to_json = jsonl.to_json

    def wait_then_convert(span: FinishedSpan) -> str:
        at_first.set()
        assert go_on.wait(timeout=60)
        return to_json(span)

    monkeypatch.setattr(jsonl, "to_json", wait_then_convert)
    yield at_first, go_on
    go_on.set()


def test_spans_are_on_disk_when_the_sink_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "spans.jsonl"
    with JsonlSink(path) as sink, use_sink(sink):
        with span("outer", ids=[1, 2], text="grüß"), span("inner"):
            pass
        with pytest.raises(ValueError, match="bad"), span("failing"):
            raise ValueError("bad")
    inner, outer, failing = lines(path)
    assert inner["parent_id"] == outer["span_id"]
    assert outer["attributes"] == {"ids": [1, 2], "text": "grüß"}
    assert failing["error"] == {"type": "ValueError", "message": "bad"}
    assert sink.report == SinkReport(written=3, dropped=0, failed=0)


@pytest.mark.asyncio
async def test_it_closes_without_blocking_the_loop_and_only_once(tmp_path: Path) -> None:
    async with JsonlSink(tmp_path / "spans.jsonl") as sink:
        sink.record(make_span())
    assert sink.close() == await sink.aclose() == SinkReport(written=1, dropped=0, failed=0)


def test_a_second_sink_appends(tmp_path: Path) -> None:
    for _ in range(2):
        with JsonlSink(tmp_path / "spans.jsonl") as sink:
            sink.record(make_span())
    assert len(lines(tmp_path / "spans.jsonl")) == 2


def test_a_full_queue_drops_at_once_and_says_so(
    tmp_path: Path, held_writer: HeldWriter, caplog: pytest.LogCaptureFixture
) -> None:
    at_first, go_on = held_writer
    path = tmp_path / "spans.jsonl"
    with JsonlSink(path, capacity=2) as sink:
        sink.record(make_span("written"))
        assert at_first.wait(timeout=60)
        for name in ("queued", "queued", "dropped", "dropped", "dropped"):
            sink.record(make_span(name))
        assert sink.report.dropped == 3
        go_on.set()
    assert sink.report == SinkReport(written=3, dropped=3, failed=0)
    assert [line.get("name") for line in lines(path)] == ["written", "queued", "queued", None]
    assert lines(path)[-1] == {"dropped": 3}
    assert "a span is dropped" in caplog.text
    assert "is incomplete: 3 span(s) written, 3 dropped" in caplog.text


def test_a_closed_sink_does_not_record(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "spans.jsonl")
    sink.close()
    assert not sink.recording
    sink.record(make_span())
    assert sink.report.dropped == 1


def test_a_full_disk_is_counted_and_reported_and_does_not_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk:
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(tmp_path), "open", lambda *_, **__: FullDisk())
    with JsonlSink(tmp_path / "spans.jsonl") as sink:
        sink.record(make_span())
        sink.record(make_span())
    assert sink.report == SinkReport(written=0, dropped=0, failed=2)
    assert "No space left on device" in caplog.text
    assert "2 lost to write errors" in caplog.text


def test_a_span_that_cannot_be_written_costs_itself_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "spans.jsonl"
    with JsonlSink(path, capacity=10) as sink:
        sink.record(make_span("huge", number=10**5000))
        sink.record(make_span("half", text="a\udc80b"))
        sink.record(make_span("good"))
    assert sink.report == SinkReport(written=2, dropped=0, failed=1)
    assert [line["name"] for line in lines(path)] == ["half", "good"]
    assert lines(path)[0]["attributes"] == {"text": "a\udc80b"}
    assert "cannot write the span 'huge': ValueError" in caplog.text


def test_a_file_that_cannot_be_opened_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        JsonlSink(tmp_path)


def test_a_queue_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        JsonlSink(tmp_path / "spans.jsonl", capacity=0)


@settings(deadline=None)
@given(st.dictionaries(st.text(), plain))
def test_every_attribute_can_be_written(attributes: dict[str, object]) -> None:
    finished = make_span()
    written = FinishedSpan(
        name=finished.name,
        trace_id=finished.trace_id,
        span_id=finished.span_id,
        parent_id=None,
        start_unix_ns=1,
        duration_ns=2,
        attributes=MappingProxyType({key: freeze(value) for key, value in attributes.items()}),
        error=SpanError(type="E", message="m"),
    )
    line = jsonl.to_json(written)
    assert "\n" not in line
    assert json.loads(line)["attributes"] == attributes


def test_a_deferred_value_is_computed_by_the_writing_thread(tmp_path: Path) -> None:
    threads: list[str] = []

    def compute() -> tuple[str, ...]:
        threads.append(threading.current_thread().name)
        return ("text",)

    with JsonlSink(tmp_path / "t.jsonl") as sink, use_sink(sink), span("call") as call:
        call.set(output={"response_text": Deferred(compute)})
    (line,) = (tmp_path / "t.jsonl").read_text().splitlines()
    assert json.loads(line)["attributes"] == {"output": {"response_text": ["text"]}}
    assert threads != [threading.current_thread().name]
    assert len(threads) == 1
