"""Sinks that keep spans in memory, or hand them to several others.

Invariant: `record` returns at once and does not raise. The one sink that has to do slow work,
`JsonlSink`, is in `jsonl.py`.
"""

from __future__ import annotations

from treadle.tracing.span import FinishedSpan, TraceSink, record_safely


class MemorySink:
    """Keeps every span in a list, in the order in which they closed: children before parents.

    Unbounded: for tests, and for one trajectory at a time.
    """

    def __init__(self) -> None:
        self._spans: list[FinishedSpan] = []

    @property
    def recording(self) -> bool:
        """Always True."""
        return True

    @property
    def spans(self) -> tuple[FinishedSpan, ...]:
        """What was recorded until now."""
        return tuple(self._spans)

    def record(self, span: FinishedSpan) -> None:
        """Keep `span`."""
        self._spans.append(span)


class Fanout:
    """Gives each span to several sinks; one that fails does not keep it from the others.

    Does not own its sinks: whoever made a sink that needs closing closes it.
    """

    def __init__(self, *sinks: TraceSink) -> None:
        self._sinks = sinks

    @property
    def recording(self) -> bool:
        """True if any of the sinks records."""
        return any(sink.recording for sink in self._sinks)

    def record(self, span: FinishedSpan) -> None:
        """Give `span` to every sink that records."""
        for sink in self._sinks:
            if sink.recording:
                record_safely(sink, span)
