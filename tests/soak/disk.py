"""The disk of the runs of a soak: a small separate file system, which gets full, slow and stuck.

It is an ext4 file system in a file, mounted through a loop device. What is full raises ENOSPC for
every writer, and what is frozen (FIFREEZE) keeps every writer waiting, as a disk does that stands
still. A slow disk is frozen and thawed in turn. All are the kernel's own, so nothing of the run is
replaced. It takes the right to mount.
"""

import contextlib
import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Disk", "mounted_disk"]

_SIZE_MIB = 400
_BLOCK = b"\0" * (1 << 20)
_FREEZE, _THAW = 0xC0045877, 0xC0045878  # FIFREEZE and FITHAW of linux/fs.h
_FROZEN_S, _THAWED_S = 0.2, 0.1


class Disk:
    """The mounted file system.

    Attributes:
        path: Where it is mounted.
        stands_still: Whether writers wait now, for `stand_still`.
        is_slow: Whether they wait now and again.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.stands_still = self.is_slow = False
        self._clock = clock
        self._filler = path / "filler"
        self._is_frozen = False
        self._over_at = self._turn_at = 0.0

    def fill(self) -> None:
        """Leaves no room."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(_BLOCK)
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(_BLOCK[:512])

    def stand_still(self, seconds: float) -> None:
        """Keeps every writer waiting for some time; `continue_due` ends it."""
        self.stands_still, self._over_at = True, self._clock() + seconds
        self._freeze()

    def slow_down(self, seconds: float) -> None:
        """Keeps writers waiting for two thirds of some time, in pieces of `continue_due`."""
        self.is_slow, self._over_at = True, self._clock() + seconds
        self._turn_at = self._clock()
        self.continue_due()

    def continue_due(self, *, everything: bool = False) -> None:
        """Lets writers continue, or wait, if the time for it has come; call it often.

        Args:
            everything: Whether they continue in any case.
        """
        if not (self.stands_still or self.is_slow):
            return
        now = self._clock()
        if everything or now >= self._over_at:
            self.stands_still = self.is_slow = False
            self._thaw()
        elif self.is_slow and now >= self._turn_at:
            turn, seconds = (
                (self._thaw, _THAWED_S) if self._is_frozen else (self._freeze, _FROZEN_S)
            )
            turn()
            self._turn_at = self._clock() + seconds

    def _freeze(self) -> None:
        self._control(_FREEZE)
        self._is_frozen = True

    def _thaw(self) -> None:
        if self._is_frozen:
            self._control(_THAW)
            self._is_frozen = False

    def _control(self, request: int) -> None:
        directory = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(directory, request, 0)
        finally:
            os.close(directory)

    def free(self) -> None:
        """Gives the room back."""
        self._filler.unlink(missing_ok=True)


@contextmanager
def mounted_disk(directory: Path, clock: Callable[[], float] = time.monotonic) -> Iterator[Disk]:
    """Mounts a new file system at a new directory `disk`, and unmounts it.

    Raises:
        PermissionError: This process may not mount, or the kernel has no loop device for it.
    """
    image, path = directory / "disk.ext4", directory / "disk"
    path.mkdir()
    with image.open("wb") as file:
        os.truncate(file.fileno(), _SIZE_MIB << 20)
    try:
        _run("mkfs.ext4", "-q", "-m", "0", str(image))
        _run("mount", "-o", "loop,noatime", str(image), str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        image.unlink()
        path.rmdir()
        said = getattr(error, "stderr", "") or str(error)
        raise PermissionError(f"no file system can be mounted here: {said.strip()}") from None
    disk = Disk(path, clock)
    try:
        (path / "lost+found").rmdir()
        yield disk
    finally:
        disk.continue_due(everything=True)
        _run("umount", str(path))
        path.rmdir()
        image.unlink()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
