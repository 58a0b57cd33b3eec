"""The scratch directory: where an engine's processes meet, by sockets and notes.

Invariant: it lives as long as its engine, and one that a killed server left behind goes when the
next engine starts on this host. A lock tells them apart, which the kernel takes back however a
process ends; a directory gets its name only once it is locked. Nobody waits for a lock.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "treadle-engine-"  # Short: a socket's path has 107 bytes at most.
_UNNAMED = "treadle-new-"


class Scratch:
    """A directory of this process; made and locked here, removed by `close`."""

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
        """Removes it, with what is in it. Idempotent."""
        if self._open:
            self._open = False
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)


def _sweep(parent: Path) -> None:
    """Removes what no process holds any more."""
    for left in parent.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # It has just gone, or is somebody else's.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
