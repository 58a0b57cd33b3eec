"""A sink that hands spans to a client that may wait, from its own thread.

Invariant: every span given to `record` is either written or counted as dropped or failed; the
counts are final once `close` has returned. `record` never waits: when `capacity` spans wait for the
client, the newest span is dropped. The first loss of each kind is logged as a warning, and `close`
logs the counts.

Who waits: only the sink's thread, on the queue and in the client; `record` and `close` wake it.
`close` waits for the thread to finish the queue, at most `close_timeout_s`. A client that hangs is
then left behind: its thread is a daemon, and the spans that it has not written count as dropped.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from treadle.tracing.finished import FinishedSpan

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkReport:
    """Counts of spans: written, refused by a full queue, or lost while being written."""

    written: int
    dropped: int
    failed: int


class SpanWriter(Protocol):
    """The client of a `QueuedSink`: called by one thread, and free to wait and to raise."""

    def write(self, spans: Sequence[FinishedSpan], /) -> None:
        """Writes the spans; when it raises, all of them count as failed."""
        ...

    def close(self, dropped: int, /) -> None:
        """Finishes, when nothing more will be written; `dropped` spans never reached `write`."""
        ...


class QueuedSink:
    """Queues spans for `writer`. Close it, or use it with `with` or `async with`.

    Args:
        name: Name in the warnings: a file, an address, a service.
        writer: Receives the spans, in the order of `record`.
        capacity: Maximum number of spans that wait for the writer.
        batch: Maximum number of spans per call of the writer.
        linger_s: Maximum time in seconds that an incomplete batch waits for more spans.
        close_timeout_s: Maximum time in seconds that `close` waits for the writer.

    Raises:
        ValueError: `capacity` or `batch` is below 1.
    """

    def __init__(
        self,
        name: str,
        writer: SpanWriter,
        *,
        capacity: int = 10_000,
        batch: int = 1,
        linger_s: float = 0.0,
        close_timeout_s: float = 30.0,
    ) -> None:
        if capacity < 1 or batch < 1:
            raise ValueError(f"capacity and batch must be at least 1, got {capacity} and {batch}")
        self._name = name
        self._capacity = capacity
        self._batch = batch
        self._linger_s = linger_s
        self._close_timeout_s = close_timeout_s
        # The bound is kept by `record`, so that the end (None) always finds room.
        self._queue: queue.SimpleQueue[FinishedSpan | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = self._final = False
        self._accepted = self._written = self._dropped = self._failed = 0
        self._thread = threading.Thread(
            target=self._work, args=(writer,), name=f"trace:{name}", daemon=True
        )
        self._thread.start()

    @property
    def recording(self) -> bool:
        """True until closed."""
        return not self._closed

    @property
    def report(self) -> SinkReport:
        """The counts until now; final after `close`."""
        with self._lock:
            return SinkReport(written=self._written, dropped=self._dropped, failed=self._failed)

    def record(self, span: FinishedSpan) -> None:
        """Queues `span` for the writer, or drops it if the queue is full or the sink closed."""
        with self._lock:
            if not self._closed and self._queue.qsize() < self._capacity:
                self._accepted += 1
                self._queue.put(span)
                return
            self._dropped += 1
            first, closed = self._dropped == 1, self._closed
        if first:
            _log.warning(
                "%s: a span is dropped, because %s; later ones are counted. Trace fewer "
                "trajectories or raise the capacity",
                self._name,
                "it is closed" if closed else f"{self._capacity} were waiting to be written",
            )

    def close(self, timeout_s: float | None = None) -> SinkReport:
        """Writes what is queued, closes the writer and returns the final counts. Idempotent.

        Args:
            timeout_s: Maximum time in seconds to wait for the writer. None: `close_timeout_s`.
        """
        timeout_s = self._close_timeout_s if timeout_s is None else timeout_s
        with self._lock:
            first = not self._closed
            self._closed = True
        if first:
            self._queue.put(None)
        if not self._final:
            self._thread.join(timeout_s)
        with self._lock:
            hangs = not self._final
            if hangs:
                self._final = True
                self._dropped = self._dropped + self._accepted - self._written - self._failed
        if first and (self._dropped or self._failed):
            _log.warning(
                "%s is incomplete: %d span(s) written, %d dropped, %d lost to write errors%s",
                self._name,
                self._written,
                self._dropped,
                self._failed,
                f"; it did not finish within {timeout_s:g} s" if hangs else "",
            )
        return self.report

    async def aclose(self, timeout_s: float | None = None) -> SinkReport:
        """`close` without blocking the event loop."""
        return await asyncio.to_thread(self.close, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def _work(self, writer: SpanWriter) -> None:
        more = True
        while more:
            spans, more = self._next_batch()
            if spans:
                self._write(writer, spans)
        try:
            writer.close(self._dropped)
        except Exception as error:
            _log.warning("%s: cannot be closed: %r", self._name, error)
        with self._lock:
            self._final = True

    def _next_batch(self) -> tuple[list[FinishedSpan], bool]:
        """Returns the next spans, and False if they are the last ones."""
        spans: list[FinishedSpan] = []
        until: float | None = None
        while len(spans) < self._batch:
            try:
                left = None if until is None else max(0.0, until - time.monotonic())
                span = self._queue.get(timeout=left)
            except queue.Empty:
                break
            if span is None:
                return spans, False
            spans.append(span)
            until = until or time.monotonic() + self._linger_s
        return spans, True

    def _write(self, writer: SpanWriter, spans: Sequence[FinishedSpan]) -> None:
        problem: Exception | None = None
        try:
            writer.write(spans)
        except Exception as error:
            # The thread must survive any client and any span: `close` waits for it.
            problem = error
        with self._lock:
            if self._final:  # `close` has counted these spans as dropped.
                return
            if problem is None:
                self._written += len(spans)
                return
            first = self._failed == 0
            self._failed += len(spans)
        if first:
            _log.error(
                "%s: cannot write the span %r%s: %r; later losses are counted",
                self._name,
                spans[0].name,
                f" and {len(spans) - 1} more" if len(spans) > 1 else "",
                problem,
            )
