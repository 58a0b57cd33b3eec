"""Reads a metrics log in increments, by byte offset, while a run appends to it.

Invariant: an increment has whole lines only, each once. A cursor names the bytes before it by their
checksum, so that a log that was rewritten meanwhile, as a resumed run does, is read again and never
continued in the middle. A damaged line is left out and counted.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["START", "Increment", "InvalidCursorError", "read_increment", "read_lines"]

START: Final = "0-0"
"""The cursor of a reader that has read nothing."""

_MAX_BYTES: Final = 8 << 20
_CHECKED_BYTES: Final = 256
_CURSOR: Final = re.compile(r"(\d{1,15})-(\d{1,10})", re.ASCII)


class InvalidCursorError(ValueError):
    """The text is no cursor that an increment gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Increment:
    """The lines that were appended since a cursor.

    Attributes:
        lines: Metric to value of each line, the step included; None: the value was not finite.
        cursor: Where the next increment begins.
        restarted: The log was rewritten, and the lines are those from its beginning.
        damaged: Number of lines that were left out.
        more: Whether the log has more already.
    """

    lines: list[dict[str, float | None]]
    cursor: str
    restarted: bool
    damaged: int
    more: bool


def read_increment(path: Path, cursor: str = START) -> Increment:
    """Returns the whole lines after a cursor, 8 MiB of them at most.

    Args:
        path: The log; one that is missing is empty.
        cursor: `START`, or what the increment before returned.

    Raises:
        InvalidCursorError: The cursor is malformed.
        OSError: The log cannot be read.
    """
    match = _CURSOR.fullmatch(cursor)
    if match is None:
        raise InvalidCursorError(f"cursor {cursor!r:.40} is malformed: begin again with {START}")
    offset, checksum = int(match[1]), int(match[2])
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return Increment(lines=[], cursor=START, restarted=offset > 0, damaged=0, more=False)
    with file:
        before = max(0, offset - _CHECKED_BYTES)
        # A file system refuses a place that no file of it can have.
        shorter = offset > os.fstat(file.fileno()).st_size
        file.seek(0 if shorter else before)
        seen = b"" if shorter else file.read(offset - before)
        restarted = shorter or len(seen) < offset - before or zlib.crc32(seen) != checksum
        if restarted:
            offset, seen = 0, b""
            file.seek(0)
        new = file.read(_MAX_BYTES)
        more = len(new) == _MAX_BYTES
    # A line that is longer than an increment is nothing that a run writes: it is passed, as damage.
    whole = new if more and b"\n" not in new else new[: new.rfind(b"\n") + 1]
    parsed = [_line(text) for text in whole.splitlines()]
    lines = [line for line in parsed if line is not None]
    tail = (seen + whole)[-_CHECKED_BYTES:]
    return Increment(
        lines=lines,
        cursor=f"{offset + len(whole)}-{zlib.crc32(tail)}",
        restarted=restarted,
        damaged=len(parsed) - len(lines),
        more=more,
    )


def read_lines(path: Path) -> tuple[list[dict[str, float | None]], int]:
    """Returns all lines of a log, and the number of damaged ones.

    Raises:
        OSError: The file cannot be read.
    """
    lines, damaged, cursor, more = [], 0, START, True
    while more:
        found = read_increment(path, cursor)
        lines += found.lines
        damaged += found.damaged
        cursor, more = found.cursor, found.more
    return lines, damaged


def _line(text: bytes) -> dict[str, float | None] | None:
    """Returns the values of a line; None if it is damaged."""
    try:
        values = json.loads(text)
    except (RecursionError, ValueError):
        return None
    if not isinstance(values, dict) or not isinstance(values.get("step"), int):
        return None
    if any(isinstance(v, bool) or not isinstance(v, int | float | None) for v in values.values()):
        return None
    return {name: _finite(value) for name, value in values.items()}


def _finite(value: float | None) -> float | None:
    try:
        return value if value is None or math.isfinite(value) else None
    except OverflowError:
        return None
