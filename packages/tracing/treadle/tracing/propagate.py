"""The parent of a span, carried to another process and back in a W3C `traceparent` header.

Invariant: what cannot be understood is treated as absent, never as an error: the other side may be
newer, older or something else entirely (W3C Trace Context, section 3.2).

    metadata = (("x-token", token), *inject())            # caller: gRPC metadata, HTTP headers
    with serving_span(sink, context.invocation_metadata, "serve"):   # callee: below the caller's
        ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from treadle.tracing.finished import SpanContext
from treadle.tracing.sink import NullSink, TraceSink
from treadle.tracing.span import (
    NULL_SPAN,
    SpanHandle,
    current_span,
    span,
    use_parent,
    use_sink,
)

TRACE_HEADER = "traceparent"
"""The key of the metadata, and of a header, that names a span as parent."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def inject() -> tuple[tuple[str, str], ...]:
    """Returns the metadata that names the current span as parent; empty outside of a span."""
    span = current_span()
    if span is None:
        return ()
    return ((TRACE_HEADER, f"00-{span.trace_id}-{span.span_id}-01"),)


def extract(metadata: Iterable[tuple[str, str | bytes]]) -> SpanContext | None:
    """Returns the caller's span named in `metadata`.

    Args:
        metadata: Key and value pairs as gRPC gives them; keys in any case.

    Returns:
        None if there is no header, more than one, a malformed one, or one whose caller does not
        record its trace (sampled flag not set).
    """
    values = [value for key, value in metadata if key.lower() == TRACE_HEADER]
    if len(values) != 1 or not isinstance(values[0], str):
        return None
    match = _TRACEPARENT.fullmatch(values[0].strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    # Version ff is forbidden; version 00 has exactly four fields, later ones may have more.
    if version == "ff" or (version == "00" and rest is not None):
        return None
    if set(trace_id) == {"0"} or set(span_id) == {"0"} or not int(flags, 16) & 1:
        return None
    return SpanContext(trace_id=trace_id, span_id=span_id)


@contextmanager
def serving_span(
    sink: TraceSink,
    metadata: Callable[[], Iterable[tuple[str, str | bytes]] | None],
    name: str,
    /,
    **attributes: object,
) -> Iterator[SpanHandle]:
    """Serves a call within a span below the caller's; the caller decides what is traced.

    Args:
        sink: Where the spans of the block go.
        metadata: Returns the call's metadata; called only if `sink` records.

    Returns:
        The span; one that does nothing if the caller does not record its trace.
    """
    if not sink.recording:
        yield NULL_SPAN
        return
    parent = extract(metadata() or ())
    with (
        use_sink(sink if parent is not None else NullSink()),
        use_parent(parent),
        span(name, **attributes) as trace,
    ):
        yield trace
