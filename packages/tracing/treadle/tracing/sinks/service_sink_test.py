import json
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from treadle.tracing import MemorySink, inject, service_sink, serving_span, span, use_sink
from treadle.tracing.sinks.testing import Request, http_server


def test_a_served_call_is_below_its_caller_in_every_sink(tmp_path: Path) -> None:
    sent: list[ExportTraceServiceRequest] = []

    def collect(request: Request) -> tuple[int, str, bytes]:
        sent.append(ExportTraceServiceRequest.FromString(request.body))
        return 200, "application/x-protobuf", b""

    path = tmp_path / "spans.jsonl"
    with use_sink(caller := MemorySink()), span("call"):
        metadata = inject()
    with (
        http_server(collect) as address,
        service_sink(jsonl=path, otlp=address, service="server") as sink,
        serving_span(sink, lambda: metadata, "serve", tokens=3) as served,
    ):
        assert served.recording
    (line,) = map(json.loads, path.read_text().splitlines())
    (parent,) = caller.spans
    assert (line["trace_id"], line["parent_id"]) == (parent.trace_id, parent.span_id)
    (resource,) = sent[0].resource_spans
    (exported,) = resource.scope_spans[0].spans
    assert exported.span_id.hex() == line["span_id"]
    assert exported.parent_span_id.hex() == parent.span_id


def test_without_a_sink_the_metadata_is_not_read() -> None:
    def unread() -> None:
        raise AssertionError

    with (
        service_sink(jsonl=None, otlp=None, service="server") as sink,
        serving_span(sink, unread, "serve") as served,
    ):
        assert not served.recording
        assert inject() == ()


def test_a_caller_that_records_nothing_is_served_without_a_span() -> None:
    with serving_span(sink := MemorySink(), tuple, "serve") as served, span("below"):
        assert not served.recording
    assert sink.spans == ()
