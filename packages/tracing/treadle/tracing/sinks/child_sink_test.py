"""The process of a client, with OpenTelemetry's, whose endpoint is in the test."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle.tracing import SinkReport
from treadle.tracing.sinks.child_sink import ChildSink
from treadle.tracing.sinks.testing import (
    Answer,
    Request,
    child_environment,
    http_server,
    make_span,
    otlp_spans,
)

pytestmark = pytest.mark.timeout(120)

_OK: Answer = (200, "application/x-protobuf", b"")


class Endpoint:
    """Counts spans; waits first if it is told to."""

    def __init__(self) -> None:
        self.num_spans = 0
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def __call__(self, request: Request) -> Answer:
        self.asked.set()
        self.go_on.wait()
        self.num_spans += len(otlp_spans(request))
        return _OK


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.go_on.set()


def make_sink(tmp_path: Path, address: str, **options: Any) -> ChildSink:
    return ChildSink(
        "otlp",
        {"endpoint": address, "service": "trainer"},
        environment=child_environment(),
        log_path=tmp_path / "logs" / "traces.log",
        **{"close_timeout_s": 150.0, **options},
    )


def test_what_is_queued_is_written_before_the_end(tmp_path: Path, endpoint: Endpoint) -> None:
    with http_server(endpoint) as address, make_sink(tmp_path, address) as sink:
        for _ in range(1000):
            sink.record(make_span("turn", text="grüß \udc80"))
        assert sink.close() == sink.close() == SinkReport(written=1000, dropped=0, failed=0)
    assert endpoint.num_spans == 1000
    assert sink.bytes_written > 1000 * 100


def test_a_client_that_hangs_is_ended_with_its_process(tmp_path: Path, endpoint: Endpoint) -> None:
    endpoint.go_on.clear()
    with http_server(endpoint) as address:
        sink = make_sink(tmp_path, address, capacity=10, close_timeout_s=0.1)
        for _ in range(10):
            sink.record(make_span("turn"))
        assert endpoint.asked.wait(60)
        assert sink.close() == SinkReport(written=0, dropped=10, failed=0)
        endpoint.go_on.set()


def test_a_client_that_cannot_start_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_sink(tmp_path, "nowhere") as sink:
        sink.record(make_span("turn"))
    assert sink.report == SinkReport(written=0, dropped=0, failed=1)
    assert "traces to otlp: cannot write the span 'turn'" in caplog.text
    assert "failed at its start: ValueError: 'nowhere' is not the address" in caplog.text


def test_a_process_that_dies_costs_its_spans(
    tmp_path: Path, endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint.go_on.clear()
    with http_server(endpoint) as address:
        sink = make_sink(tmp_path, address)
        sink.record(make_span("turn"))
        assert endpoint.asked.wait(60)
        os.kill(sink._process.pid, 9)
        assert sink.close() == SinkReport(written=0, dropped=0, failed=1)
        endpoint.go_on.set()
    assert "its process has ended; see" in caplog.text


def test_nothing_waits_for_a_client_that_was_not_used(tmp_path: Path) -> None:
    sink = make_sink(tmp_path, "http://127.0.0.1:9")
    assert sink.close() == SinkReport(written=0, dropped=0, failed=0)
