"""A sink of any service that takes OpenTelemetry's protocol (OTLP), as protobuf over HTTP.

Ids and times are ours, unchanged, so that the spans of several processes form one trace. `inputs`
and `output` become OpenInference's `input.value` and `output.value`, which Phoenix and Langfuse
show as such; other nested attributes become JSON. An error is the span's status and an event
`exception`.

The exporter is OpenTelemetry's, with its retries and its variables `OTEL_EXPORTER_OTLP_*`; the
queue before it is `QueuedSink`, which counts what is lost.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.util.types import AttributeValue

from treadle.tracing import FinishedSpan, QueuedSink
from treadle.tracing.finished import INPUTS, OUTPUT
from treadle.tracing.jsonl import thaw
from treadle.tracing.sinks.otel_span import kind_of, readable_span, valid_text
from treadle.tracing.sinks.otlp_address import traces_url

__all__ = ["OtlpSink", "OtlpWriter"]

_BATCH: Final = 64
"""Spans per request: a turn's text may be 100 kB, and collectors take some 20 MB."""


class OtlpSink(QueuedSink):
    """Sends spans to an OTLP endpoint. Close it, or use it with `with` or `async with`.

    Args:
        endpoint: Its address, with or without `/v1/traces` at the end. None means the address in
            `OTEL_EXPORTER_OTLP_ENDPOINT` or a related variable, else http://localhost:4318.
        service: Name of this process in the service, `service.name`.
        headers: Sent with each request, beside those of `OTEL_EXPORTER_OTLP_HEADERS`.
        capacity: Maximum number of spans that wait to be sent.
        close_timeout_s: Maximum time in seconds that `close` waits.
    """

    def __init__(
        self,
        endpoint: str | None,
        service: str,
        headers: Mapping[str, str] | None = None,
        *,
        capacity: int = 10_000,
        close_timeout_s: float = 30.0,
    ) -> None:
        super().__init__(
            f"OpenTelemetry at {endpoint or 'OTEL_EXPORTER_OTLP_ENDPOINT'}",
            OtlpWriter(endpoint, service, headers),
            capacity=capacity,
            batch=_BATCH,
            linger_s=1.0,
            close_timeout_s=close_timeout_s,
        )


class OtlpWriter:
    """Sends spans to an OTLP endpoint; see `SpanWriter`, and `OtlpSink` for the arguments.

    Raises:
        ValueError: `endpoint` is not an HTTP address.
    """

    def __init__(
        self, endpoint: str | None, service: str, headers: Mapping[str, str] | None = None
    ) -> None:
        url = None if endpoint is None else traces_url(endpoint)
        self._resource = Resource.create({"service.name": service})
        self._client = OTLPSpanExporter(url, headers=headers)

    def write(self, spans: Sequence[FinishedSpan]) -> None:
        """Sends the spans in one request.

        Raises:
            ConnectionError: The endpoint did not take them, also after retries.
        """
        sent = self._client.export(
            [readable_span(span, _attributes(span), self._resource) for span in spans]
        )
        if sent is not SpanExportResult.SUCCESS:
            # The exporter has logged the cause; it does not return it.
            raise ConnectionError("the endpoint did not take them; OpenTelemetry's log says why")

    def close(self, dropped: int) -> None:
        """Ends the connection; each write is complete."""
        self._client.shutdown()  # type: ignore[no-untyped-call]


def _attributes(span: FinishedSpan) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {"openinference.span.kind": kind_of(span)}
    for key, value in span.attributes.items():
        if key in (INPUTS, OUTPUT):
            name = "input" if key == INPUTS else "output"
            as_text = isinstance(value, str)
            attributes[f"{name}.value"] = valid_text(value) if as_text else _json(value)
            attributes[f"{name}.mime_type"] = "text/plain" if as_text else "application/json"
        elif value is not None:  # an attribute of OpenTelemetry has a value
            attributes[valid_text(key)] = _value(value)
    return attributes


def _value(value: object) -> AttributeValue:
    """Returns what an attribute may be: a scalar, or a list of scalars of one type."""
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else hex(value)
    if isinstance(value, tuple | list):
        types = {type(item) for item in value}
        if len(types) <= 1 and types <= {str, bool, float, int}:
            converted = [_value(item) for item in value]
            if {type(item) for item in converted} == types:
                return converted
    return _json(value)


def _json(value: object) -> str:
    return valid_text(json.dumps(value, ensure_ascii=False, default=thaw))
