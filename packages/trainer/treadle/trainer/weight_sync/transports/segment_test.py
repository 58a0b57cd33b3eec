import fcntl
import os

import pytest

from treadle.trainer.weight_sync.transports.segment import Segment


@pytest.fixture
def segment() -> Segment:
    """Two slots."""
    return Segment(num_slots=2, slot_bytes=5000)


def test_slots_lie_behind_the_page_that_names_the_update(segment: Segment) -> None:
    assert (segment.slot_bytes, segment.num_bytes) == (8192, 4096 + 2 * 8192)
    assert [segment.start(0), segment.start(1)] == [4096, 4096 + 8192]
    segment.name_update("a-longer-name")
    segment.name_update("u")
    segment.view(segment.start(1), 3)[:] = b"abc"
    assert os.pread(segment.fd, 4096, 0) == b"u".ljust(4096, b"\0")
    assert os.pread(segment.fd, 3, segment.start(1)) == b"abc"


def test_it_cannot_shrink_under_a_reader(segment: Segment) -> None:
    assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 4096)
    assert os.readlink(f"/proc/self/fd/{segment.fd}").startswith("/memfd:treadle-")


def test_it_goes_with_its_views_and_its_descriptor_at_once() -> None:
    segment = Segment(num_slots=1, slot_bytes=1)
    fd, view = segment.fd, segment.view(segment.start(0), 4)
    del segment
    view[:] = b"good"
    assert bytes(view) == b"good"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
