"""The descendants of a process, for tests that no process is left behind.

Invariant: a process is identified by a pidfd, so a later process with the same id is not
confused with it. Who waits: the test, until the kernel reports the end of the last one.
"""

import contextlib
import os
import select
from collections import defaultdict
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """Returns the children of `pid` and their descendants; any may end at any time."""
    # From the parent of each process: a thread that ends takes its list of children with it.
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children[parent].append(int(stat.parent.name))
    found: set[int] = set()
    left = [pid]
    while left:
        began = children[left.pop()]
        found.update(began)
        left.extend(began)
    return found


def shm_files(pid: int) -> set[Path]:
    """Returns the files in /dev/shm that `pid` and its descendants have mapped."""
    mapped: set[int] = set()
    for one in (pid, *descendants(pid)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/{one}/maps").read_text().splitlines()
            # By inode: a semaphore is mapped before it gets its name.
            mapped |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    found = set()
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process of the machine removed it
            if path.stat().st_ino in mapped:
                found.add(path)
    return found


class Descendants:
    """The current descendants of a process.

    Args:
        pid: The process, which is not included.
    """

    def __init__(self, pid: int) -> None:
        self._open: set[int] = set()
        for child in descendants(pid):
            with contextlib.suppress(ProcessLookupError):
                self._open.add(os.pidfd_open(child))

    def __len__(self) -> int:
        """Number of descendants whose end `wait_gone` has not seen yet."""
        return len(self._open)

    def wait_gone(self) -> None:
        """Blocks until all of them have ended."""
        ends = select.poll()
        for descriptor in self._open:
            ends.register(descriptor, select.POLLIN)
        while self._open:
            for descriptor, _ in ends.poll():
                ends.unregister(descriptor)
                os.close(descriptor)
                self._open.discard(descriptor)
