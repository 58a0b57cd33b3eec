"""A sink that writes spans to a file, one JSON object per line, from its own thread.

Invariant: that of `QueuedSink`. Each line is complete on its way to the disk when the thread turns
to the next one, so a killed process loses what was queued and no more.

A line: {"name", "trace_id", "span_id", "parent_id", "start_unix_ns", "duration_ns", "attributes",
"error": null or {"type", "message"}}. If spans were dropped, the last line is {"dropped": n}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from treadle.tracing.finished import Deferred, FinishedSpan, SpanError
from treadle.tracing.queued import QueuedSink


class JsonlSink(QueuedSink):
    """Appends spans to `path`. Close it, or use it with `with` or `async with`.

    Args:
        path: The file to append to; its directory is created.
        capacity: The most spans that may wait for the disk.

    Raises:
        OSError: The file cannot be opened for writing.
    """

    def __init__(self, path: Path, *, capacity: int = 10_000) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = _LineWriter(path.open("ab", buffering=0))
        super().__init__(str(path), self._lines, capacity=capacity)

    @property
    def bytes_written(self) -> int:
        """The size of what this sink has written."""
        return self._lines.bytes_written


class _LineWriter:
    """Writes each span as a line. The file is unbuffered: see the invariant."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.bytes_written = 0

    def write(self, spans: Sequence[FinishedSpan]) -> None:
        for span in spans:
            self._write_line(to_json(span))

    def close(self, dropped: int) -> None:
        with self._file:
            if dropped:
                with suppress(OSError):
                    self._write_line(json.dumps({"dropped": dropped}))

    def _write_line(self, line: str) -> None:
        data = to_bytes(line)
        if (written := self._file.write(data)) != len(data):
            raise OSError(f"only {written} of {len(data)} bytes were written")
        self.bytes_written += written


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
        default=thaw,
    )


def span_of(fields: Mapping[str, Any]) -> FinishedSpan:
    """Returns the span of a line, decoded by `json`."""
    error = fields["error"]
    return FinishedSpan(**{**fields, "error": None if error is None else SpanError(**error)})


def to_bytes(line: str) -> bytes:
    """Returns the line as UTF-8, with its newline.

    Half of a surrogate pair is not valid text, but its escape is valid JSON.
    """
    return line.encode(errors="backslashreplace") + b"\n"


def thaw(value: object) -> object:
    """Returns a frozen attribute as what `json` takes; for its argument `default`."""
    if isinstance(value, Deferred):
        return value.compute()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"span attributes are frozen to plain data, yet hold {type(value).__name__}")
