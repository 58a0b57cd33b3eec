"""A sink that writes spans to a file, one JSON object per line, from its own thread.

Invariant: every span given to `record` is either written or counted as dropped; the counts are
exact once `close` has returned. `record` never waits: the queue holds `capacity` spans, and when it
is full the newest span is dropped and the loss reported. Only the writer thread waits, on the
queue; `record` and `close` wake it. `close` waits for the writer to finish the queue.

A line: {"name", "trace_id", "span_id", "parent_id", "start_unix_ns", "duration_ns", "attributes",
"error": null or {"type", "message"}}. If spans were dropped, the last line is {"dropped": n}.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from treadle.tracing.finished import FinishedSpan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkReport:
    """What became of the spans: on disk, refused by a full queue, or lost while being written."""

    written: int
    dropped: int
    failed: int


class JsonlSink:
    """Appends spans to `path`. Close it, or use it with `with` or `async with`.

    Args:
        path: The file to append to; its directory is created.
        capacity: The most spans that may wait for the disk.

    Raises:
        OSError: The file cannot be opened for writing.
    """

    def __init__(self, path: Path, *, capacity: int = 10_000) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._queue: queue.Queue[FinishedSpan | None] = queue.Queue(maxsize=capacity)
        self._lock = threading.Lock()
        self._closed = False
        self._written = self._dropped = self._failed = 0
        # Unbuffered: a line is on its way to the disk when the writer turns to the next one, so
        # a killed process loses what was queued and no more.
        file = path.open("ab", buffering=0)
        self._writer = threading.Thread(
            target=self._write, args=(file,), name=f"trace:{path.name}", daemon=True
        )
        self._writer.start()

    @property
    def recording(self) -> bool:
        """True until closed."""
        return not self._closed

    @property
    def report(self) -> SinkReport:
        """The counts until now; final after `close`."""
        return SinkReport(written=self._written, dropped=self._dropped, failed=self._failed)

    def record(self, span: FinishedSpan) -> None:
        """Queue `span` for writing, or drop it if the queue is full or the sink closed."""
        with self._lock:
            if not self._closed:
                try:
                    self._queue.put_nowait(span)
                except queue.Full:
                    pass
                else:
                    return
            self._dropped += 1
            dropped = self._dropped
        if _is_power_of_ten(dropped):
            log.warning(
                "%s: %d span(s) dropped, because %d were waiting for the disk; trace fewer "
                "trajectories or raise the capacity",
                self._path,
                dropped,
                self._queue.maxsize,
            )

    def close(self) -> SinkReport:
        """Writes what is queued, closes the file and returns the final counts. Idempotent."""
        with self._lock:
            first = not self._closed
            self._closed = True
        if first:
            self._queue.put(None)
        self._writer.join()
        if first and (self._dropped or self._failed):
            log.warning(
                "%s is incomplete: %d span(s) written, %d dropped, %d lost to write errors",
                self._path,
                self._written,
                self._dropped,
                self._failed,
            )
        return self.report

    async def aclose(self) -> SinkReport:
        """`close` without blocking the event loop."""
        return await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.aclose()

    def _write(self, file: BinaryIO) -> None:
        with file:
            while (span := self._queue.get()) is not None:
                if self._write_span(file, span):
                    self._written += 1
                else:
                    self._failed += 1
            if self._dropped:
                with suppress(OSError):
                    self._write_line(file, json.dumps({"dropped": self._dropped}))

    def _write_span(self, file: BinaryIO, span: FinishedSpan) -> bool:
        try:
            return self._write_line(file, to_json(span))
        except Exception as error:
            # The thread must survive any span: `close` waits for it.
            if _is_power_of_ten(self._failed + 1):
                log.error("%s: cannot write the span %r: %r", self._path, span.name, error)
            return False

    def _write_line(self, file: BinaryIO, line: str) -> bool:
        # Half of a surrogate pair is not valid text, but its escape is valid JSON.
        data = line.encode(errors="backslashreplace") + b"\n"
        return file.write(data) == len(data)


def to_json(span: FinishedSpan) -> str:
    """Returns one line of the file, without its newline."""
    return json.dumps(
        {
            "name": span.name,
            "trace_id": span.trace_id,
            "span_id": span.span_id,
            "parent_id": span.parent_id,
            "start_unix_ns": span.start_unix_ns,
            "duration_ns": span.duration_ns,
            "attributes": dict(span.attributes),
            "error": None
            if span.error is None
            else {"type": span.error.type, "message": span.error.message},
        },
        ensure_ascii=False,
        default=_thaw,
    )


def _thaw(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"span attributes are frozen to plain data, yet hold {type(value).__name__}")


def _is_power_of_ten(count: int) -> bool:
    return count > 0 and set(str(count)[1:]) <= {"0"} and str(count)[0] == "1"
