"""The container: how much memory and processor time the process's control groups leave it.

Invariant: a limit counts wherever it is set, in the process's own group or in one around it, in
version 2 of the control groups or in version 1. What cannot be read is no limit.
"""

import math
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
# What one version calls it, and the other: limit, use, and in memory.stat the file pages that
# can be dropped.
_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def memory_bytes(groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """What the tightest limit leaves; None where there is none.

    Args:
        groups: Where the control groups are mounted.
        membership: The file that says which ones the process is in.
    """
    return min(_rooms(groups, membership), default=None)


def processors(groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """As how many processors the smallest quota comes to, rounded up; None where there is none."""
    return min(_quotas(groups, membership), default=None)


def _rooms(groups: Path, membership: Path) -> Iterator[int]:
    for group in _around("memory", groups, membership):
        for limit, current, droppable in _MEMORY:
            try:
                most = int((group / limit).read_text())  # "max" where there is none
                used = int((group / current).read_text())
                lines = (group / "memory.stat").read_text().splitlines()
                yield max(0, most - used + int(dict(line.split() for line in lines)[droppable]))
            except (OSError, ValueError, KeyError):
                continue


def _quotas(groups: Path, membership: Path) -> Iterator[int]:
    for group in _around("cpu", groups, membership):
        try:
            if (group / "cpu.max").is_file():
                quota, period = map(int, (group / "cpu.max").read_text().split())
            else:
                quota = int((group / "cpu.cfs_quota_us").read_text())
                period = int((group / "cpu.cfs_period_us").read_text())
        except (OSError, ValueError):
            continue
        if quota > 0:  # -1 where there is none
            yield math.ceil(quota / period)


def _around(controller: str, groups: Path, membership: Path) -> Iterator[Path]:
    """The process's group and those around it; not all need be visible here."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", controller) or controller in controllers.split(","):
            root = groups / controller if controllers else groups
            own = root / path.lstrip("/")
            yield own
            yield from (group for group in own.parents if group.is_relative_to(root))
