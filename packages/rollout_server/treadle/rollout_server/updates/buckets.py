"""Shared memory: the segment of a sender on this host, and the parts of tensors in its buckets.

Invariant: a segment is opened only if it is a memfd named "treadle-...", sealed against shrinking
(so that reading it never faults), whose first page names the update. Only bytes between that page
and the segment's end are read.

There is no checksum: the pages that are read are those that the sender wrote, not a copy that
something in between could have changed. The first page reveals a segment of another process; the
tensor, offset and length of a part reveal one that is duplicated, out of order or missing. To read
every byte once more would halve the speed.

Nobody waits here.
"""

import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass

from treadle.rollout_server.engine import FilePlace
from treadle.rollout_server.errors import InvalidField, SegmentUnreadable

_LINK = "/memfd:treadle-"
_FIRST_PAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPart:
    """Bytes of one tensor in a segment: ``tensor[offset:][:length] = segment[start:][:length]``."""

    tensor_index: int
    offset: int
    length: int
    start: int


class MappedSegment:
    """Memory of another process; its descriptor here stays open for as long as the object lives."""

    def __init__(self, *, pid: int, fd: int, num_bytes: int, update_id: str) -> None:
        """Opens it.

        Raises:
            SegmentUnreadable: There is no such descriptor here, or it is not a segment.
        """
        self.num_bytes = num_bytes
        try:
            self._fd = _open(pid, fd)
            weakref.finalize(self, os.close, self._fd)
            _check(self._fd, num_bytes, update_id)
            self._map = mmap.mmap(self._fd, num_bytes)
        except (OSError, ValueError) as error:
            cause = getattr(error, "strerror", None) or str(error)
            raise SegmentUnreadable(pid, fd, cause) from error

    def check(self, part: BucketPart) -> None:
        """Checks that the segment has the bytes of a part.

        Raises:
            InvalidField: They lie outside.
        """
        last = self.num_bytes - part.length
        if not _FIRST_PAGE <= part.start <= last:
            raise InvalidField("part.start", part.start, f"{_FIRST_PAGE} to {last}")

    def view(self, part: BucketPart) -> memoryview:
        """Returns the bytes of a part, in the sender's memory; they must not be written."""
        return memoryview(self._map)[part.start : part.start + part.length]

    def place(self, part: BucketPart) -> FilePlace:
        """Returns where other processes of this host find a part while this object lives."""
        return FilePlace(path=f"/proc/{os.getpid()}/fd/{self._fd}", offset=part.start)


def _open(pid: int, fd: int) -> int:
    path = f"/proc/{pid}/fd/{fd}"
    link = os.readlink(path)
    if not link.startswith(_LINK):  # Opening a pipe or a device may do something.
        raise ValueError(f"it is {link!r}, expected {_LINK!r}...")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _check(fd: int, num_bytes: int, update_id: str) -> None:
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("it could shrink: seal it with F_SEAL_SHRINK")
    size = os.fstat(fd).st_size
    if not _FIRST_PAGE <= num_bytes <= size:
        raise ValueError(f"it has {size} bytes, announced {num_bytes}")
    named = os.pread(fd, _FIRST_PAGE, 0).split(b"\0", 1)[0]
    if named != update_id.encode():
        shown = named.decode(errors="replace")
        raise ValueError(f"it is for update {shown!r}, expected {update_id!r}")
