"""A span in OpenTelemetry's form, which its exporters and MLflow take.

Ids, times, error and nesting are ours, unchanged; the attributes depend on who takes them.
"""

from collections.abc import Mapping
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

from treadle.tracing import FinishedSpan

__all__ = ["kind_of", "readable_span", "valid_text"]

_SCOPE: Final = InstrumentationScope("treadle.tracing")
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)

_KINDS: Final[Mapping[str, str]] = {
    "trajectory": "AGENT",
    "generate": "LLM",
    "tool": "TOOL",
    "reward": "EVALUATOR",
}


def kind_of(span: FinishedSpan) -> str:
    """Returns the kind of a span in the words that OpenInference and MLflow share."""
    return _KINDS.get(span.name, "CHAIN")


def readable_span(
    span: FinishedSpan, attributes: Mapping[str, AttributeValue], resource: Resource
) -> ReadableSpan:
    """Returns the span with these attributes; an error is its status and an event `exception`."""
    status = Status(StatusCode.UNSET)
    events: tuple[Event, ...] = ()
    if (error := span.error) is not None:
        kind, message = valid_text(error.type), valid_text(error.message)
        status = Status(StatusCode.ERROR, f"{kind}: {message}")
        event = {"exception.type": kind, "exception.message": message}
        events = (Event("exception", event, span.end_unix_ns),)
    return ReadableSpan(
        valid_text(span.name),
        _context(span.trace_id, span.span_id),
        None if span.parent_id is None else _context(span.trace_id, span.parent_id),
        resource,
        attributes,
        events,
        kind=SpanKind.INTERNAL,
        instrumentation_scope=_SCOPE,
        status=status,
        start_time=span.start_unix_ns,
        end_time=span.end_unix_ns,
    )


def valid_text(text: object) -> str:
    """Returns valid Unicode: protobuf and databases refuse half of a surrogate pair."""
    return str(text).encode(errors="backslashreplace").decode()


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), False, _SAMPLED)
