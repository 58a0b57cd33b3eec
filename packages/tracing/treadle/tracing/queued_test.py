import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from treadle.tracing import FinishedSpan, QueuedSink, SinkReport


class Client:
    """Keeps what it is given; waits or raises where it is told to."""

    def __init__(self, before_write: Callable[[], object] = lambda: None) -> None:
        self._before_write = before_write
        self.batches: list[list[str]] = []
        self.closed_with: int | None = None

    def write(self, spans: Sequence[FinishedSpan]) -> None:
        self._before_write()
        self.batches.append([span.name for span in spans])

    def close(self, dropped: int) -> None:
        self.closed_with = dropped


@pytest.fixture
def hang() -> Iterator[threading.Event]:
    """What a client waits for that hangs; set at the end, so that no thread stays behind."""
    event = threading.Event()
    yield event
    event.set()


def make_span(name: str = "turn") -> FinishedSpan:
    return FinishedSpan(
        name=name,
        trace_id="a" * 32,
        span_id="b" * 16,
        parent_id=None,
        start_unix_ns=1,
        duration_ns=2,
        attributes={},
        error=None,
    )


def test_spans_arrive_in_batches_in_their_order() -> None:
    go_on = threading.Event()
    client = Client(before_write=go_on.wait)
    with QueuedSink("client", client, batch=3) as sink:
        for number in range(8):
            sink.record(make_span(str(number)))
        go_on.set()
    assert [name for batch in client.batches for name in batch] == list("01234567")
    assert max(len(batch) for batch in client.batches) == 3
    assert client.closed_with == 0
    assert sink.report == SinkReport(written=8, dropped=0, failed=0)


def test_an_incomplete_batch_waits_for_more_spans_and_not_at_the_end() -> None:
    client = Client()
    with QueuedSink("client", client, batch=100, linger_s=3600) as sink:
        for _ in range(5):
            sink.record(make_span())
    assert [len(batch) for batch in client.batches] == [5]


def test_a_client_that_hangs_blocks_neither_record_nor_the_end(
    hang: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    in_write = threading.Event()

    def wait() -> None:
        in_write.set()
        hang.wait()

    sink = QueuedSink("client", Client(wait), capacity=2, close_timeout_s=0.01)
    sink.record(make_span())
    assert in_write.wait(60)
    for _ in range(5):
        sink.record(make_span())
    assert sink.close() == SinkReport(written=0, dropped=6, failed=0)
    hang.set()
    assert sink.close() == SinkReport(written=0, dropped=6, failed=0)
    assert "a span is dropped, because 2 were waiting to be written" in caplog.text
    assert "did not finish within 0.01 s" in caplog.text


def test_a_client_that_raises_loses_its_batch_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse() -> None:
        raise ConnectionError("nobody listens")

    with QueuedSink("http://down", Client(refuse)) as sink:
        for _ in range(5):
            sink.record(make_span())
    assert sink.report == SinkReport(written=0, dropped=0, failed=5)
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1 and "http://down" in errors[0] and "nobody listens" in errors[0]


def test_an_end_that_raises_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Bad(Client):
        def close(self, dropped: int) -> None:
            raise OSError("gone")

    QueuedSink("client", Bad()).close()
    assert "client: cannot be closed: OSError('gone')" in caplog.text
