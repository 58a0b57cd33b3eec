"""Memory and processor limits of the process's control groups.

Invariant: a limit counts wherever it is set: in the process's own group or a parent of it, in
version 1 or 2 of control groups. A file that cannot be read sets no limit.
"""

import math
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
# File names of versions 2 and 1: limit, usage, and the key in memory.stat of reclaimable pages.
_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def memory_bytes(groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """Returns the bytes that the tightest memory limit leaves; None without a limit.

    Args:
        groups: Mount point of the control groups.
        membership: File that lists the control groups of the process.
    """
    return min(_memory_left(groups, membership), default=None)


def processors(groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """Returns the smallest processor quota, rounded up to processors; None without a quota."""
    return min(_quotas(groups, membership), default=None)


def _memory_left(groups: Path, membership: Path) -> Iterator[int]:
    for group in _with_parents("memory", groups, membership):
        for limit, current, droppable in _MEMORY:
            try:
                most = int((group / limit).read_text())  # "max" means no limit.
                used = int((group / current).read_text())
                lines = (group / "memory.stat").read_text().splitlines()
                yield max(0, most - used + int(dict(line.split() for line in lines)[droppable]))
            except (OSError, ValueError, KeyError):
                continue


def _quotas(groups: Path, membership: Path) -> Iterator[int]:
    for group in _with_parents("cpu", groups, membership):
        try:
            if (group / "cpu.max").is_file():
                quota, period = map(int, (group / "cpu.max").read_text().split())
            else:
                quota = int((group / "cpu.cfs_quota_us").read_text())
                period = int((group / "cpu.cfs_period_us").read_text())
        except (OSError, ValueError):
            continue
        if quota > 0:  # -1 means no quota.
            yield math.ceil(quota / period)


def _with_parents(controller: str, groups: Path, membership: Path) -> Iterator[Path]:
    """Yields the process's group and its parents; some may not be visible here."""
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
