"""Memory cgroups: a bound that the kernel keeps, also on what cannot be seen from within.

Invariant: each program runs in its own cgroup, below a directory that was given to this
sandbox alone or that it made below its own cgroup (`own_cgroup`); it is removed when every process
of the program is gone. The supervisor's limits hold as before; the kernel's bound is above them by
`ROOM_MIB`, for what only the kernel counts: socket buffers, locks, cached names, page tables.

A process moves into its cgroup when the interpreter is ready, before it gets a program, so that a
start costs no additional process.

Who waits: nobody.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from treadle.agent_loop import SetupError

ROOM_MIB: Final = 64
"""Memory that the kernel may hold for a program, beyond its limit."""
_PREFIX: Final = "treadle-"
_OWN_PREFIX: Final = "treadle-sandbox-"
_OWN_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """The kernel's names of files: the bound, others that are written, and the count of kills."""

    bound: str
    others: tuple[tuple[str, str], ...]
    events: str


# Version 2 ends all processes of a program together, version 1 the largest.
_V2: Final = _Files(
    bound="memory.max",
    others=(("memory.swap.max", "0"), ("memory.oom.group", "1")),
    events="memory.events",
)
_V1: Final = _Files(bound="memory.limit_in_bytes", others=(), events="memory.oom_control")


class Cgroup:
    """The cgroup of one program.

    Args:
        events: The file that counts the processes that the kernel ended.
    """

    def __init__(self, path: Path, events: str) -> None:
        self._path = path
        self._events = events

    def add(self, pid: int) -> None:
        """Moves a process into it; what it forks from now on is in it too."""
        (self._path / "cgroup.procs").write_text(str(pid))

    def exceeded(self) -> bool:
        """Returns whether the kernel ended a process of it at the bound."""
        lines = (self._path / self._events).read_text().splitlines()
        return any(line.startswith("oom_kill ") and line != "oom_kill 0" for line in lines)

    def remove(self) -> None:
        """No process of it is left."""
        with contextlib.suppress(OSError):  # Then the next sandbox of the directory removes it.
            self._path.rmdir()


class Cgroups:
    """Makes the cgroups of programs.

    Args:
        parent: A directory of the cgroup file system that is used by this sandbox only.
        memory_mib: The limit of each program.

    Raises:
        SetupError: It cannot be used, and why.
    """

    def __init__(self, parent: Path, *, memory_mib: int) -> None:
        self._parent = parent
        self._bound = str((memory_mib + ROOM_MIB) << 20)
        self._numbers = itertools.count()
        try:
            _remove_cgroups(parent)  # of a sandbox that was killed
            trial = parent / f"{_PREFIX}trial"
            trial.mkdir()
            self._files = next((f for f in (_V2, _V1) if (trial / f.bound).exists()), None)
            trial.rmdir()
        except OSError as error:
            raise SetupError(
                f"no cgroup can be made in {parent}: {error.strerror}; name a directory of the "
                "cgroup file system that this user may write, or none"
            ) from error
        if self._files is None:
            raise SetupError(
                f"the cgroups in {parent} do not bound memory: name one with the memory "
                "controller (version 2: in its cgroup.subtree_control), or none"
            )

    def make(self) -> Cgroup:
        """Returns a new cgroup.

        Raises:
            OSError: The kernel refuses it.
        """
        assert self._files is not None
        path = self._parent / f"{_PREFIX}{next(self._numbers)}"
        path.mkdir()
        (path / self._files.bound).write_text(self._bound)
        for name, value in self._files.others:
            with contextlib.suppress(OSError):  # a kernel without swap
                (path / name).write_text(value)
        return Cgroup(path, self._files.events)


@contextlib.contextmanager
def own_cgroup() -> Iterator[Path | None]:
    """Makes a cgroup for one sandbox below the memory cgroup of this process, for a `with`.

    Yields None where the kernel gives none: the file system is read-only, belongs to another user,
    or, in version 2, the cgroup of this process does not hand its memory controller on.
    """
    path = _make_own_cgroup()
    try:
        yield path
    finally:
        if path is not None:
            _remove_cgroups(path)
            with contextlib.suppress(OSError):
                path.rmdir()


def _make_own_cgroup() -> Path | None:
    parent = find_memory_cgroup(
        Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()
    )
    if parent is None:
        return None
    for left in parent.glob(f"{_OWN_PREFIX}*"):
        pid = left.name.removeprefix(_OWN_PREFIX).partition("-")[0]
        if not Path("/proc", pid).exists():
            _remove_cgroups(left)
            with contextlib.suppress(OSError):
                left.rmdir()
    path = parent / f"{_OWN_PREFIX}{os.getpid()}-{next(_OWN_NUMBERS)}"
    try:
        path.mkdir()
    except OSError:
        return None
    try:
        control = path / "cgroup.subtree_control"
        if control.exists():
            control.write_text("+memory")
        Cgroups(path, memory_mib=0)
    except (OSError, SetupError):
        path.rmdir()
        return None
    return path


def find_memory_cgroup(memberships: str, mounts: str) -> Path | None:
    """Returns where the memory cgroup of a process is in the file system, if it is mounted.

    Args:
        memberships: The text of its /proc/PID/cgroup.
        mounts: The text of its /proc/PID/mountinfo.
    """
    places = {}
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        places[controllers] = PurePosixPath(path)
    v1 = next((names for names in places if "memory" in names.split(",")), None)
    for line in mounts.splitlines():
        fields, _, kind = line.partition(" - ")
        root, mount_point = fields.split()[3:5]
        file_system, _, options = kind.split(" ", 2)
        if v1 is not None:
            found = file_system == "cgroup" and "memory" in options.split(",")
        else:
            found = file_system == "cgroup2" and "" in places
        # A container may see only its own part of the tree.
        if found and (place := places[v1 or ""]).is_relative_to(root):
            return Path(mount_point, place.relative_to(root))
    return None


def _remove_cgroups(parent: Path) -> None:
    """Removes the cgroups of programs that no process is in."""
    for left in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            left.rmdir()
