"""JSON Lines files that a run appends to, each line an object with the step it belongs to.

Invariant: a file is whole lines up to some step, and at most one torn line at its end, left by a
crash; readers pass over it, and a resumed run removes it together with the steps that come again.
A damaged line before the last stops a reader; a resumed run leaves it out and keeps the file as it
was, because training needs none of them.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MOST_STEPS = 1 << 53  # So that a float holds it too.
_log = logging.getLogger(__name__)


class DamagedLineError(ValueError):
    """A line before the last is not a JSON object with a step; the text names it."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of all whole lines.

    Raises:
        OSError: The file cannot be read.
        DamagedLineError: A line before the last is not a JSON object with a step.
    """
    values = []
    for _, value in _whole_lines(path):
        if isinstance(value, DamagedLineError):
            raise value
        values.append(value)
    return values


def undamaged_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of all whole lines that are not damaged.

    Raises:
        OSError: The file cannot be read.
    """
    for _, value in _whole_lines(path):
        if not isinstance(value, DamagedLineError):
            yield value


def keep_lines(path: Path, last_step: int) -> int:
    """Rewrites `path` with only its whole lines of steps up to `last_step`, at once or not at all.

    Damaged lines are left out, with a warning; the file with them is then kept as NAME.damaged.

    Returns:
        The step of the last line kept, or -1 if none is left or there is no file.

    Raises:
        OSError: The file cannot be read or written.
    """
    if not path.exists():
        return -1
    kept: list[tuple[bytes, dict[str, Any]]] = []
    damaged: list[DamagedLineError] = []
    for line, value in _whole_lines(path):
        if isinstance(value, DamagedLineError):
            damaged.append(value)
        elif value["step"] <= last_step:
            kept.append((line, value))
    if damaged:
        beside = path.with_name(f"{path.name}.damaged")
        shutil.copyfile(path, beside)
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        _log.warning("%s%s; left out, and the file as it was is %s", damaged[0], more, beside)
    temporary = path.with_suffix(path.suffix + ".tmp")
    with temporary.open("wb") as file:
        file.writelines(line for line, _ in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return int(kept[-1][1]["step"]) if kept else -1


def _is_step(value: object) -> bool:
    return isinstance(value, int) and abs(value) < _MOST_STEPS


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | DamagedLineError]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            where = f"{path}, line {number} is damaged"
            try:
                value = json.loads(line)
            except (RecursionError, ValueError) as error:
                yield line, DamagedLineError(f"{where}: {error}")
                continue
            if not isinstance(value, dict) or not _is_step(value.get("step")):
                yield line, DamagedLineError(f"{where}: not an object with a step")
                continue
            yield line, value
