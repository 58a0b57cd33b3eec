"""Spans, collected until their trace is complete.

Invariant: every span that is added leaves once, with its trace: when the root arrives, which closes
last; or when too many traces are open, the oldest first; or at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

from treadle.tracing.finished import FinishedSpan


class WholeTraces:
    """The open traces.

    Args:
        limit: Maximum number of open traces. More are open only where roots do not arrive: where
            they are in another process, or a child outlives its root.
    """

    def __init__(self, limit: int = 10_000) -> None:
        self._limit = limit
        self._open: dict[str, list[FinishedSpan]] = {}

    def add(self, span: FinishedSpan) -> Iterator[list[FinishedSpan]]:
        """Adds a span; yields the traces that are complete with it, in closing order each."""
        if span.parent_id is None:
            yield [*self._open.pop(span.trace_id, ()), span]
            return
        self._open.setdefault(span.trace_id, []).append(span)
        if len(self._open) > self._limit:
            yield self._open.pop(next(iter(self._open)))

    def rest(self) -> Iterator[list[FinishedSpan]]:
        """Yields the traces that are still open, and forgets them."""
        rest, self._open = self._open, {}
        yield from rest.values()
