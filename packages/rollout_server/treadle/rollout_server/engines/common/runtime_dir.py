"""The runtime directory: sockets and error reports of an engine's processes.

Invariant: it lives as long as its engine. A directory that a killed server left behind is
removed when the next engine starts on this host. A live engine holds a file lock on its directory,
which the kernel releases however the process ends; a directory gets its final name only once it is
locked. Nothing waits for a lock.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "treadle-engine-"  # Short: the path of a socket has at most 107 bytes.
_UNNAMED = "treadle-new-"


class RuntimeDir:
    """A directory of this process, created and locked here, removed by `close`."""

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        _sweep(parent)
        unnamed = Path(tempfile.mkdtemp(prefix=_UNNAMED, dir=parent))
        self.path = parent / (_PREFIX + unnamed.name.removeprefix(_UNNAMED))
        self._lock = os.open(unnamed, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(self.path)
        self._open = True

    def close(self) -> None:
        """Removes the directory with its contents. Idempotent."""
        if self._open:
            self._open = False
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)


@contextlib.contextmanager
def files_in(directory: Path) -> Iterator[None]:
    """Redirects temporary files of this process: engines leave sockets and others behind."""
    before = tempfile.tempdir
    tempfile.tempdir = str(directory)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _sweep(parent: Path) -> None:
    """Removes directories that no process has locked."""
    for left in parent.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # It was just removed, or belongs to another user.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
