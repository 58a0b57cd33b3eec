"""A finding: what one check says."""

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """How bad it is."""

    OK = "OK"
    WARN = "WARN"  # It works, and not as well as it could.
    FAIL = "FAIL"  # The server will not start, or will break.


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check says.

    Attributes:
        check: Its name.
        level: How bad it is.
        value: What was found.
        cause: Why that is bad; "" when it is not.
        fix: What to do; "" when there is nothing to do.
    """

    check: str
    level: Level
    value: str
    cause: str = ""
    fix: str = ""


def ok(check: str, value: str) -> Finding:
    """All is well."""
    return Finding(check=check, level=Level.OK, value=value)


def warn(check: str, value: str, cause: str, fix: str) -> Finding:
    """It works, and not as well as it could."""
    return Finding(check=check, level=Level.WARN, value=value, cause=cause, fix=fix)


def fail(check: str, value: str, cause: str, fix: str) -> Finding:
    """The server will not start, or will break."""
    return Finding(check=check, level=Level.FAIL, value=value, cause=cause, fix=fix)


def gib(num_bytes: int) -> str:
    """Bytes for people."""
    return f"{num_bytes / (1 << 30):.1f} GiB"
