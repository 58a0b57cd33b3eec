"""The descendants: what a process has started, and what that has, for tests that nothing is left.

Invariant: a process is held by a descriptor, so that another one that gets its number later is
not taken for it. Who waits: the test, until the kernel says that the last one has ended.
"""

import contextlib
import os
import select
from collections import defaultdict
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """Processes that `pid` started, and theirs, of which any may end at any time."""
    # By what each says of its parent: a thread that ends takes its list of children with it.
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


class Descendants:
    """Those that a process has now.

    Args:
        pid: The process, which is not among them.
    """

    def __init__(self, pid: int) -> None:
        self._open: set[int] = set()
        for child in descendants(pid):
            with contextlib.suppress(ProcessLookupError):
                self._open.add(os.pidfd_open(child))

    def __len__(self) -> int:
        """How many have not been seen to end."""
        return len(self._open)

    def wait_gone(self) -> None:
        """Returns when all of them have ended; blocks."""
        ends = select.poll()
        for descriptor in self._open:
            ends.register(descriptor, select.POLLIN)
        while self._open:
            for descriptor, _ in ends.poll():
                ends.unregister(descriptor)
                os.close(descriptor)
                self._open.discard(descriptor)
