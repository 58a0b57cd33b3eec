"""What the tests of sinks share: spans, and an HTTP server that keeps what it is sent."""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from treadle.tracing import FinishedSpan, SpanError
from treadle.tracing.span import freeze, new_id

__all__ = [
    "Answer",
    "Request",
    "child_environment",
    "http_server",
    "make_span",
    "make_trace",
    "otlp_spans",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request of a client; the names of its headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


Answer = tuple[int, str, bytes]
"""Status, content type, body."""


@contextmanager
def http_server(answer: Callable[[Request], Answer]) -> Iterator[str]:
    """Serves on loopback in this block, a thread per connection.

    Args:
        answer: Called for each request; may wait.

    Yields:
        The address, as http://127.0.0.1:PORT.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(method=self.command, path=self.path, headers=headers, body=body)
            status, content_type, content = answer(request)
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _serve

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # A handler may wait in `answer` for a test that has failed.
    server.daemon_threads, server.block_on_close = True, False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def otlp_spans(request: Request) -> list[Span]:
    """Returns the spans of a request that an OTLP endpoint was sent."""
    return [
        span
        for resource in ExportTraceServiceRequest.FromString(request.body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def child_environment(**variables: str) -> dict[str, str]:
    """Returns the environment of a process that imports what this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}


def make_span(
    name: str,
    *,
    parent: FinishedSpan | None = None,
    start_unix_ns: int = 1_700_000_000_000_000_000,
    duration_ns: int = 2_000_000,
    error: SpanError | None = None,
    **attributes: object,
) -> FinishedSpan:
    """Returns a span as `treadle.tracing.span` records it."""
    return FinishedSpan(
        name=name,
        trace_id=new_id(128) if parent is None else parent.trace_id,
        span_id=new_id(64),
        parent_id=None if parent is None else parent.span_id,
        start_unix_ns=start_unix_ns,
        duration_ns=duration_ns,
        attributes={key: freeze(value) for key, value in attributes.items()},
        error=error,
    )


def make_trace(
    *, step: int = 1, sample_index: int = 0, rollout_n: int = 0, error: SpanError | None = None
) -> list[FinishedSpan]:
    """Returns the spans of a trajectory in the order in which they close: the root last."""
    shared: dict[str, Any] = {
        "step": step,
        "sample_index": sample_index,
        "rollout_n": rollout_n,
        "validate": False,
        "experiment_name": "run",
    }
    second = 1_000_000_000
    start = 1_700_000_000 * second
    root = make_span(
        "trajectory",
        start_unix_ns=start,
        duration_ns=9 * second,
        error=error,
        inputs={"task_id": "t"},
        output={"messages": [{"role": "user", "content": "grüß"}]},
        reward=0.5,
        **shared,
    )
    turn = make_span(
        "turn", parent=root, start_unix_ns=start + second, duration_ns=7 * second, **shared
    )
    generate = make_span(
        "generate",
        parent=turn,
        start_unix_ns=start + 2 * second,
        duration_ns=3 * second,
        ids=[1, 2, 3],
        response_text="5",
        **shared,
    )
    tool = make_span(
        "tool",
        parent=turn,
        start_unix_ns=start + 6 * second,
        duration_ns=second,
        error=SpanError(type="ZeroDivisionError", message="division by zero"),
        inputs={"expression": "1/0"},
        output=None,
        **shared,
    )
    return [generate, tool, turn, root]
