"""The segment: memory of a policy rank that the rollout servers of its host read.

Invariant: the segment is as long as it was made and cannot shrink (it is sealed), so that a reader
never faults; its first page names the update that its slots hold bytes of, so that nobody takes
the segment of another process, of the same number in another container, for this one. It is a
memfd: it has no path in a file system, fits where `/dev/shm` does not, and is gone when the last
process that has it mapped is gone, however that one ended.

Its pages are touched once, when it is made: to take fresh ones from the kernel costs several times
as much as to copy into them. So a rank keeps its segment from update to update.
"""

import fcntl
import mmap
import os
import weakref

__all__ = ["Segment"]

_PAGE = 4096
_NAME = "treadle-weights"


class Segment:
    """Some slots of equal size. The memory goes with it and with its views."""

    def __init__(self, *, num_slots: int, slot_bytes: int) -> None:
        """Takes the memory.

        Raises:
            OSError: there is not enough of it.
        """
        self.num_slots = num_slots
        self.slot_bytes = -(-slot_bytes // _PAGE) * _PAGE
        self.num_bytes = _PAGE + num_slots * self.slot_bytes
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        os.posix_fallocate(self.fd, 0, self.num_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._map = mmap.mmap(self.fd, self.num_bytes, flags=flags)

    def name_update(self, update_id: str) -> None:
        """Says whose bytes the slots are going to hold."""
        self._map[:_PAGE] = update_id.encode().ljust(_PAGE, b"\0")

    def start(self, slot: int) -> int:
        """Where a slot begins, in bytes."""
        return _PAGE + slot * self.slot_bytes

    def view(self, start: int, length: int) -> memoryview:
        """Writable."""
        return memoryview(self._map)[start : start + length]
