"""A finding: the result of one check of a doctor, the trainer's or the server's, and its output."""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Finding", "Level", "as_table", "fail", "gib", "ok", "warn"]


class Level(enum.Enum):
    """Severity of a finding."""

    OK = "OK"
    WARN = "WARN"  # It works, with a limitation, or only some runs fail.
    FAIL = "FAIL"  # A run does not start, or will fail.


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
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
        """Returns the finding as plain data."""
        return dataclasses.asdict(self) | {"level": self.level.value}


def ok(check: str, value: str) -> Finding:
    """Returns a finding without a problem."""
    return Finding(check=check, level=Level.OK, value=value)


def warn(check: str, value: str, cause: str, fix: str) -> Finding:
    """Returns a finding about a limitation."""
    return Finding(check=check, level=Level.WARN, value=value, cause=cause, fix=fix)


def fail(check: str, value: str, cause: str, fix: str) -> Finding:
    """Returns a finding about a failure."""
    return Finding(check=check, level=Level.FAIL, value=value, cause=cause, fix=fix)


def gib(num_bytes: int) -> str:
    """Formats bytes in GiB."""
    return f"{num_bytes / (1 << 30):.1f} GiB"


def as_table(found: Mapping[str, Sequence[Finding]], *, max_width: float = math.inf) -> str:
    """Returns the findings of each area as text for people.

    Args:
        max_width: Longest name of a check, in characters, that widens the column of names.
    """
    every = [finding for findings in found.values() for finding in findings]
    width = int(min(max_width, max(len(finding.check) for finding in every)))
    lines = []
    for area, findings in found.items():
        lines.append(area)
        for finding in findings:
            value = finding.value.replace("\n", f"\n{'':{width + 10}}")
            lines.append(f"  {finding.level.value:4}  {finding.check:{width}}  {value}")
            if finding.cause:
                lines.append(f"        {'':{width}}  because: {finding.cause}")
            if finding.fix:
                lines.append(f"        {'':{width}}  do: {finding.fix}")
    counts = [f"{sum(f.level is level for f in every)} {level.value}" for level in Level]
    return "\n".join([*lines, ", ".join(counts)])
