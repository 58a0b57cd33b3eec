"""A semaphore that all processes of a host share.

Invariant: at most `slots` are held under one name, over all processes of this user, however they
end: a slot is a lock on a byte of a file, which the kernel releases with the process. Within a
process, waiters are served in order of arrival.

Who waits: the caller that enters `slot`. Who wakes it: a process that releases a slot writes to the
file, one that dies closes it, and inotify reports both. The kernel reports a close shortly before
it frees the locks, so the first waiter of each process also checks at long intervals.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import hashlib
import os
import stat
import struct
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Self

from treadle.agent_loop import SetupError

_IN_MODIFY: Final = 0x2
_IN_CLOSE_WRITE: Final = 0x8
_LOOK_AGAIN_S: Final = 1.0


class HostSemaphore:
    """Use it as an async context, and `slot` inside.

    Args:
        name: Name of the limit; the same in every process that shares it.
        slots: Maximum number of slots held. The smallest number among the processes applies.
        directory: Where the files are; by default one of this user's in the temporary directory.
    """

    def __init__(self, name: str, slots: int, *, directory: Path | None = None) -> None:
        if slots < 1:
            raise ValueError(f"slots is {slots}; it must be at least 1")
        user_directory = Path(tempfile.gettempdir()) / f"treadle-limits-{os.getuid()}"
        self._directory = directory or user_directory
        self._path = self._directory / hashlib.sha256(name.encode()).hexdigest()[:32]
        self._slots = slots
        self._held: set[int] = set()
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._file = self._events = -1

    async def __aenter__(self) -> Self:
        """Opens the file.

        Raises:
            SetupError: The directory belongs to someone else, or the kernel gives no inotify.
        """
        self._directory.mkdir(mode=0o700, exist_ok=True)
        about = self._directory.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
            raise SetupError(f"{self._directory} is not a directory of this user; remove it")
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._events = _watch(self._path)
        except SetupError:
            os.close(self._file)
            raise
        asyncio.get_running_loop().add_reader(self._events, self._on_event)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Closes it; slots still held are given back."""
        asyncio.get_running_loop().remove_reader(self._events)
        os.close(self._events)
        os.close(self._file)
        self._held.clear()

    @property
    def held(self) -> int:
        """Slots that this process holds."""
        return len(self._held)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Holds a slot for the block; waits until there is one."""
        async with self._turn:
            while (number := self._take()) is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_AGAIN_S):
                        await self._changed.wait()
        try:
            yield
        finally:
            self._give_back(number)

    def _take(self) -> int | None:
        self._changed.clear()  # before looking, so that no change in between is missed
        for number in range(self._slots):
            if number not in self._held and self._lock(number, fcntl.F_WRLCK):
                self._held.add(number)
                return number
        return None

    def _give_back(self, number: int) -> None:
        if number in self._held:
            self._held.remove(number)
            self._lock(number, fcntl.F_UNLCK)
            os.pwrite(self._file, b"\0", 0)  # the bell, for this process too

    def _lock(self, number: int, kind: int) -> bool:
        # A lock of the open file and not of the process: two limits in one process count as two.
        region = struct.pack("hhqqi", kind, os.SEEK_SET, number, 1, 0)
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, region)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: another has it
            return False
        return True

    def _on_event(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._events, 1 << 16)
        self._changed.set()


def _watch(path: Path) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    events: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if events >= 0:
        if libc.inotify_add_watch(events, os.fsencode(path), _IN_MODIFY | _IN_CLOSE_WRITE) >= 0:
            return events
        os.close(events)
    reason = os.strerror(ctypes.get_errno())
    raise SetupError(
        f"cannot watch {path}: {reason}. Raise fs.inotify.max_user_instances, or turn the limit "
        "over processes off (enable_global_rate_limit: false)"
    )
