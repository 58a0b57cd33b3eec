import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from treadle.rollout_server.errors import InvalidField, SegmentUnreadable
from treadle.rollout_server.updates.buckets import BucketPart, MappedSegment

_UPDATE = "update-1"
_DATA = bytes(range(256)) * 4
_NUM_BYTES = 4096 + len(_DATA)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def _memfd(name: str = "treadle-test", *, update_id: str = _UPDATE, seals: int = _SEALS) -> int:
    fd = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.write(fd, update_id.encode().ljust(4096, b"\0") + _DATA)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.fixture
def fd() -> Iterator[int]:
    fd = _memfd()
    yield fd
    os.close(fd)


def _open(fd: int, *, pid: int | None = None, num_bytes: int = _NUM_BYTES) -> MappedSegment:
    pid = os.getpid() if pid is None else pid
    return MappedSegment(pid=pid, fd=fd, num_bytes=num_bytes, update_id=_UPDATE)


def _part(start: int = 4096, length: int = 100) -> BucketPart:
    return BucketPart(tensor_index=0, offset=0, length=length, start=start)


def test_what_the_sender_writes_is_read_here_and_by_workers(fd: int) -> None:
    segment = _open(fd)
    part = _part(4096 + 10, 50)
    os.pwrite(fd, b"new", 4096 + 10)
    expected = b"new" + _DATA[13:60]
    place = segment.place(part)
    with open(place.path, "rb") as file:
        file.seek(place.offset)
        assert file.read(50) == segment.view(part) == expected


def test_the_bytes_outlive_their_sender() -> None:
    """As when a policy rank is killed while the engine reads."""
    code = (
        "import fcntl, os, sys, time\n"
        "fd = os.memfd_create('treadle-child', os.MFD_ALLOW_SEALING)\n"
        f"os.write(fd, {_UPDATE!r}.encode().ljust(4096, b'\\0') + bytes(range(256)) * 4)\n"
        f"fcntl.fcntl(fd, fcntl.F_ADD_SEALS, {_SEALS})\n"
        "print(fd, flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        segment = _open(int(child.stdout.readline()), pid=child.pid)
        child.kill()
        child.wait()
        assert segment.view(_part()) == _DATA[:100]
        with pytest.raises(SegmentUnreadable, match="No such file or directory"):
            _open(0, pid=child.pid)


@pytest.mark.parametrize(
    ("made", "cause"),
    [
        (lambda: _memfd("other"), "it is '/memfd:other"),
        (lambda: os.open("/dev/zero", os.O_RDWR), "it is '/dev/zero'"),
        (lambda: _memfd(seals=0), "seal it with F_SEAL_SHRINK"),
        (lambda: _memfd(update_id="update-2"), "it is for update 'update-2'"),
    ],
)
def test_what_is_no_segment_of_the_update_is_not_mapped(made: object, cause: str) -> None:
    assert callable(made)
    fd = made()
    try:
        with pytest.raises(SegmentUnreadable, match=f"(?s){cause}.*sync.transport=inline"):
            _open(fd)
    finally:
        os.close(fd)


def test_a_segment_is_not_longer_than_it_is(fd: int) -> None:
    with pytest.raises(SegmentUnreadable, match=f"it has {_NUM_BYTES} bytes, announced"):
        _open(fd, num_bytes=_NUM_BYTES + 1)


def test_a_sealed_segment_cannot_be_cut_under_its_reader(fd: int) -> None:
    segment = _open(fd)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    assert segment.view(_part()) == _DATA[:100]


@pytest.mark.parametrize("start", [0, 4095, _NUM_BYTES - 99])
def test_nothing_outside_of_the_slots_is_read(fd: int, start: int) -> None:
    segment = _open(fd)
    segment.check(_part(start=_NUM_BYTES - 100))
    with pytest.raises(InvalidField, match=f"part.start is {start}, expected 4096 to"):
        segment.check(_part(start=start))
