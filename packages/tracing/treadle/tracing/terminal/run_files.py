"""Reads the metrics and the alerts of a run directory, also while the run writes them.

Invariant: a file is parsed when it has changed, and only its whole lines. A damaged line is left
out and counted; a missing file is empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Curves", "JsonLines", "read_curves"]


@dataclass(slots=True)
class JsonLines:
    """A file of one JSON object per line.

    Attributes:
        lines: The objects that it held when it was read last.
        damaged: Number of lines that were left out.
    """

    path: Path
    lines: list[Mapping[str, Any]] = field(default_factory=list)
    damaged: int = 0
    _read: tuple[int, int] | None = None

    def reload(self) -> bool:
        """Reads the file again if it has changed; returns whether it has.

        Raises:
            OSError: The file cannot be read.
        """
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            changed, self._read = self._read is not None, None
            self.lines, self.damaged = [], 0
            return changed
        state = (stat.st_mtime_ns, stat.st_size)
        if state == self._read:
            return False
        content = self.path.read_bytes()
        parsed = [_object(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
        self.lines = [line for line in parsed if line is not None]
        self.damaged = len(parsed) - len(self.lines)
        self._read = state
        return True


@dataclass(slots=True)
class Curves:
    """The values of each metric.

    Attributes:
        steps: Metric to the steps that have it.
        values: Metric to its values, finite ones only.
    """

    steps: dict[str, list[float]] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)


def read_curves(lines: list[Mapping[str, Any]]) -> Curves:
    """Returns the curves of the lines of a metrics log."""
    curves = Curves()
    for line in lines:
        step = line["step"]
        for name, value in _finite(line):
            curves.steps.setdefault(name, []).append(step)
            curves.values.setdefault(name, []).append(value)
    return curves


def _object(line: bytes) -> Mapping[str, Any] | None:
    """Returns the object of a line, which must have a step; None if it is damaged."""
    try:
        value = json.loads(line)
    except (RecursionError, ValueError):
        return None
    return value if isinstance(value, dict) and type(value.get("step")) is int else None


def _finite(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if name == "step" or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        try:
            number = float(value)
        except OverflowError:
            continue
        if math.isfinite(number):
            yield name, number
