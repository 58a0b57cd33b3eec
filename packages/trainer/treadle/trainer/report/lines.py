"""JSON Lines files that a run appends to, each line an object with the step it belongs to.

Invariant: a file is whole lines up to some step, and at most one torn line at its end, left by a
crash; readers pass over it, and a resumed run removes it together with the steps that come again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of all whole lines.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line before the last is not a JSON object with a step; the text names it.
    """
    return [value for _, value in _whole_lines(path)]


def keep_lines(path: Path, last_step: int) -> int:
    """Rewrite `path` with only its whole lines of steps up to `last_step`, at once or not at all.

    Returns:
        The step of the last line kept, or -1 if none is left or there is no file.

    Raises:
        OSError: The file cannot be read or written.
        ValueError: As for `read_lines`.
    """
    if not path.exists():
        return -1
    kept = [(line, value) for line, value in _whole_lines(path) if value["step"] <= last_step]
    temporary = path.with_suffix(path.suffix + ".tmp")
    with temporary.open("wb") as file:
        file.writelines(line for line, _ in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return int(kept[-1][1]["step"]) if kept else -1


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is damaged: {error}") from error
            if not isinstance(value, dict) or not isinstance(value.get("step"), int):
                raise ValueError(f"{path}, line {number} is damaged: not an object with a step")
            yield line, value
