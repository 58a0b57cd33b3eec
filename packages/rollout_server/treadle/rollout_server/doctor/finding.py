"""A finding: the result of one check."""

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """Severity of a finding."""

    OK = "OK"
    WARN = "WARN"  # The server works, with a limitation.
    FAIL = "FAIL"  # The server does not start, or will fail.


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
