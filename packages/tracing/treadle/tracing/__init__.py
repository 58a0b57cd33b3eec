"""Spans, sinks and metrics on the standard library alone.

`span` marks a piece of work wherever it happens; `use_sink` sets where the spans of a context go;
`Metric` and `aggregate` carry numbers from trajectories to a step.
"""

from treadle.tracing.finished import Deferred, FinishedSpan, SpanContext, SpanError, plain
from treadle.tracing.jsonl import JsonlSink
from treadle.tracing.metrics import Metric, Reduce, aggregate
from treadle.tracing.propagate import TRACE_HEADER, extract, inject, serving_span
from treadle.tracing.queued import QueuedSink, SinkReport, SpanWriter
from treadle.tracing.sampling import TraceSampler
from treadle.tracing.service_sink import service_sink
from treadle.tracing.sink import Fanout, MemorySink, NullSink, TraceSink
from treadle.tracing.span import (
    SpanHandle,
    current_attributes,
    current_sink,
    current_span,
    record_span,
    span,
    use_attributes,
    use_parent,
    use_sink,
)
from treadle.tracing.trace_filter import TraceFilter
from treadle.tracing.traced import traced

__all__ = [
    "TRACE_HEADER",
    "Deferred",
    "Fanout",
    "FinishedSpan",
    "JsonlSink",
    "MemorySink",
    "Metric",
    "NullSink",
    "QueuedSink",
    "Reduce",
    "SinkReport",
    "SpanContext",
    "SpanError",
    "SpanHandle",
    "SpanWriter",
    "TraceFilter",
    "TraceSampler",
    "TraceSink",
    "aggregate",
    "current_attributes",
    "current_sink",
    "current_span",
    "extract",
    "inject",
    "plain",
    "record_span",
    "service_sink",
    "serving_span",
    "span",
    "traced",
    "use_attributes",
    "use_parent",
    "use_sink",
]
