"""The result of one check of a doctor, the trainer's or the server's, and the table of several."""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Diagnosis", "Level", "as_table", "fail", "gib", "ok", "warn"]


class Level(enum.Enum):
    """Severity of a result."""

    OK = "OK"
    WARN = "WARN"  # It works, with a limitation, or only some runs fail.
    FAIL = "FAIL"  # A run does not start, or will fail.


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of one check.

    Attributes:
        value: The value that was found.
        cause: Why it is a problem; "" if it is not.
        fix: How to fix it; "" if there is nothing to fix.
    """

    check: str
    level: Level
    value: str
    cause: str = ""
    fix: str = ""

    def as_json(self) -> dict[str, str]:
        """Returns the result as plain data."""
        return dataclasses.asdict(self) | {"level": self.level.value}


def ok(check: str, value: str) -> Diagnosis:
    """Returns a result without a problem."""
    return Diagnosis(check=check, level=Level.OK, value=value)


def warn(check: str, value: str, cause: str, fix: str) -> Diagnosis:
    """Returns a result about a limitation."""
    return Diagnosis(check=check, level=Level.WARN, value=value, cause=cause, fix=fix)


def fail(check: str, value: str, cause: str, fix: str) -> Diagnosis:
    """Returns a result about a failure."""
    return Diagnosis(check=check, level=Level.FAIL, value=value, cause=cause, fix=fix)


def gib(num_bytes: int) -> str:
    """Formats bytes in GiB."""
    return f"{num_bytes / (1 << 30):.1f} GiB"


def as_table(found: Mapping[str, Sequence[Diagnosis]], *, max_width: float = math.inf) -> str:
    """Returns the results of each area as text for people.

    Args:
        max_width: Longest name of a check, in characters, that widens the column of names.
    """
    every = [each for results in found.values() for each in results]
    width = int(min(max_width, max(len(each.check) for each in every)))
    lines = []
    for area, results in found.items():
        lines.append(area)
        for each in results:
            value = each.value.replace("\n", f"\n{'':{width + 10}}")
            lines.append(f"  {each.level.value:4}  {each.check:{width}}  {value}")
            if each.cause:
                lines.append(f"        {'':{width}}  because: {each.cause}")
            if each.fix:
                lines.append(f"        {'':{width}}  do: {each.fix}")
    counts = [f"{sum(f.level is level for f in every)} {level.value}" for level in Level]
    return "\n".join([*lines, ", ".join(counts)])
