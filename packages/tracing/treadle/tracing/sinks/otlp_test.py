import threading

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from treadle.tracing import SinkReport, SpanError
from treadle.tracing.sinks.otlp import OtlpSink
from treadle.tracing.sinks.otlp_address import traces_url
from treadle.tracing.sinks.testing import (
    Answer,
    Request,
    http_server,
    make_span,
    make_trace,
    otlp_spans,
)

_OK: Answer = (200, "application/x-protobuf", b"")


class Collector:
    """Keeps the requests, and decodes their spans."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __call__(self, request: Request) -> Answer:
        self.requests.append(request)
        return _OK

    @property
    def spans(self) -> list[Span]:
        return [span for request in self.requests for span in otlp_spans(request)]


def plain(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(item) for item in value.array_value.values]
    return getattr(value, kind or "string_value")


def attributes(span: Span) -> dict[str, object]:
    return {item.key: plain(item.value) for item in span.attributes}


def test_a_trace_arrives_with_its_ids_times_content_and_error() -> None:
    collector, trace = Collector(), make_trace()
    with (
        http_server(collector) as address,
        OtlpSink(address, "trainer", {"Authorization": "Basic abc"}) as sink,
    ):
        for span in trace:
            sink.record(span)
        assert sink.close() == SinkReport(written=4, dropped=0, failed=0)
    (request,) = collector.requests
    assert (request.path, request.headers["authorization"]) == ("/v1/traces", "Basic abc")
    (resource,) = ExportTraceServiceRequest.FromString(request.body).resource_spans
    names = {item.key: plain(item.value) for item in resource.resource.attributes}
    assert names["service.name"] == "trainer"
    assert [
        (
            s.name,
            s.trace_id.hex(),
            s.span_id.hex(),
            s.parent_span_id.hex() or None,
            s.start_time_unix_nano,
            s.end_time_unix_nano - s.start_time_unix_nano,
        )
        for s in collector.spans
    ] == [
        (s.name, s.trace_id, s.span_id, s.parent_id, s.start_unix_ns, s.duration_ns) for s in trace
    ]
    generate, tool, _, root = collector.spans
    assert attributes(generate)["ids"] == [1, 2, 3]
    assert attributes(generate)["openinference.span.kind"] == "LLM"
    assert attributes(root)["input.value"] == '{"task_id": "t"}'
    assert attributes(root)["output.value"] == (
        '{"messages": [{"role": "user", "content": "grüß"}]}'
    )
    assert (attributes(root)["step"], attributes(root)["validate"]) == (1, False)
    assert tool.status.code == Status.STATUS_CODE_ERROR
    assert tool.status.message == "ZeroDivisionError: division by zero"
    assert {i.key: plain(i.value) for i in tool.events[0].attributes} == {
        "exception.type": "ZeroDivisionError",
        "exception.message": "division by zero",
    }
    assert root.status.code == Status.STATUS_CODE_UNSET


def test_values_that_no_attribute_can_have_arrive_as_text() -> None:
    collector = Collector()
    span = make_span(
        "tool",
        error=SpanError(type="E", message="half \udc80"),
        nested={"a": [1, {"b": None}]},
        mixed=[1, "a"],
        huge=2**70,
        half="a\udc80",
        nothing=None,
        empty=[],
        flags=[True, False],
    )
    with http_server(collector) as address, OtlpSink(address, "s") as sink:
        sink.record(span)
        assert sink.close() == SinkReport(written=1, dropped=0, failed=0)
    assert attributes(collector.spans[0]) == {
        "openinference.span.kind": "TOOL",
        "nested": '{"a": [1, {"b": null}]}',
        "mixed": '[1, "a"]',
        "huge": "0x400000000000000000",
        "half": "a\\udc80",
        "empty": [],
        "flags": [True, False],
    }


def test_the_variables_of_opentelemetry_say_where_to(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector()
    with http_server(collector) as address:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{address}/base")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=secret")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=rl")
        with OtlpSink(None, "trainer") as sink:
            sink.record(make_span("turn"))
    (request,) = collector.requests
    assert (request.path, request.headers["x-api-key"]) == ("/base/v1/traces", "secret")
    (resource,) = ExportTraceServiceRequest.FromString(request.body).resource_spans
    assert "team" in {item.key for item in resource.resource.attributes}


def test_many_spans_travel_in_few_requests() -> None:
    collector = Collector()
    with http_server(collector) as address, OtlpSink(address, "s") as sink:
        for _ in range(1000):
            sink.record(make_span("turn"))
    assert len(collector.spans) == 1000
    assert len(collector.requests) < 100


def test_an_endpoint_that_refuses_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    with (
        http_server(lambda _: (400, "text/plain", b"no")) as address,
        OtlpSink(address, "s") as sink,
    ):
        sink.record(make_span("turn"))
        assert sink.close() == SinkReport(written=0, dropped=0, failed=1)
    assert f"OpenTelemetry at {address}" in caplog.text


def test_an_endpoint_that_hangs_does_not_block_the_end() -> None:
    go_on, asked = threading.Event(), threading.Event()

    def wait(request: Request) -> Answer:
        asked.set()
        go_on.wait()
        return _OK

    with http_server(wait) as address:
        sink = OtlpSink(address, "s", close_timeout_s=0.05)
        for _ in range(100):
            sink.record(make_span("turn"))
        assert asked.wait(60)
        assert sink.close() == SinkReport(written=0, dropped=100, failed=0)
        go_on.set()


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:6006/v1/traces", "http://localhost:6006/v1/traces"),
        (
            "https://cloud.langfuse.com/api/public/otel/",
            "https://cloud.langfuse.com/api/public/otel/v1/traces",
        ),
    ],
)
def test_an_endpoint_may_leave_out_the_path(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://host:4317", "http://"])
def test_what_is_no_address_is_rejected(endpoint: str) -> None:
    with pytest.raises(ValueError, match="http://localhost:4318"):
        OtlpSink(endpoint, "s")
