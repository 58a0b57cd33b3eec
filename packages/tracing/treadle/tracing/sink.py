"""A sink: where finished spans go. This module has those that need no thread and no file.

Invariant: `record` returns at once and does not raise. A client that may wait is used through
`QueuedSink` (`queued.py`).
"""

from __future__ import annotations

import logging
from typing import Protocol

from treadle.tracing.finished import FinishedSpan

_log = logging.getLogger(__name__)

_blamed: set[type] = set()


class TraceSink(Protocol):
    """Takes finished spans. Called on the thread that closed the span, often an event loop's."""

    @property
    def recording(self) -> bool:
        """False if `record` would throw the span away: then no span is built at all."""
        ...

    def record(self, span: FinishedSpan) -> None:
        """Keeps or queues `span`. Must neither block nor raise."""
        ...


class NullSink:
    """Records nothing; callers see that in advance."""

    @property
    def recording(self) -> bool:
        """Always False."""
        return False

    def record(self, span: FinishedSpan) -> None:
        """Throws `span` away."""


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
        """The spans that were recorded until now."""
        return tuple(self._spans)

    def record(self, span: FinishedSpan) -> None:
        """Keeps `span`."""
        self._spans.append(span)


class Fanout:
    """Gives each span to several sinks; one that fails does not keep it from the others.

    Does not own its sinks: the code that made a sink closes it.
    """

    def __init__(self, *sinks: TraceSink) -> None:
        self._sinks = sinks

    @property
    def recording(self) -> bool:
        """True if any of the sinks records."""
        return any(sink.recording for sink in self._sinks)

    def record(self, span: FinishedSpan) -> None:
        """Gives `span` to every sink that records."""
        for sink in self._sinks:
            if sink.recording:
                record_safely(sink, span)


def record_safely(sink: TraceSink, finished: FinishedSpan) -> None:
    """Hands `finished` to `sink`; a sink that raises is blamed in the log, once per class.

    This is a border: sinks are written by others, and a broken one must not end a run or replace
    the exception that is on its way through the span.
    """
    try:
        sink.record(finished)
    except Exception:
        if type(sink) not in _blamed:
            _blamed.add(type(sink))
            _log.exception(
                "%s.record raised; its spans are being lost (said once)", type(sink).__qualname__
            )
