"""The disk of the runs of a soak: a small separate file system, which gets full and stands still.

It is an ext4 file system in a file, mounted through a loop device. What is full raises ENOSPC for
every writer, and what is frozen (`fsfreeze`) keeps every writer waiting, as a disk does that stands
still. Both are the kernel's own, so nothing of the run is replaced. It takes the right to mount.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Disk", "mounted_disk"]

_SIZE_MIB = 400
_BLOCK = b"\0" * (1 << 20)


class Disk:
    """The mounted file system.

    Attributes:
        path: Where it is mounted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"
        self._is_frozen = False

    def fill(self) -> None:
        """Leaves no room."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(_BLOCK)
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(_BLOCK[:512])

    def freeze(self) -> None:
        """Keeps every writer waiting until `thaw`."""
        subprocess.run(["fsfreeze", "--freeze", self.path], check=True)
        self._is_frozen = True

    def thaw(self) -> None:
        """Lets writers continue. Does nothing if they do."""
        if self._is_frozen:
            subprocess.run(["fsfreeze", "--unfreeze", self.path], check=True)
            self._is_frozen = False

    def free(self) -> None:
        """Gives the room back."""
        self._filler.unlink(missing_ok=True)


@contextmanager
def mounted_disk(directory: Path) -> Iterator[Disk]:
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
    disk = Disk(path)
    try:
        (path / "lost+found").rmdir()
        yield disk
    finally:
        disk.thaw()
        _run("umount", str(path))
        path.rmdir()
        image.unlink()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
