import mmap
import os

import pytest

from treadle.rollout_server.updates.staging import StagingArea


def test_what_is_written_is_found_at_its_place() -> None:
    area = StagingArea([5, 0, 100])
    for index, size in enumerate((5, 0, 100)):
        area.view(index)[:] = bytes([index + 1]) * size
    for index, size in enumerate((5, 0, 100)):
        place = area.place(index)
        assert place.offset % 64 == 0
        with open(place.path, "rb") as file:
            file.seek(place.offset)
            assert file.read(size) == bytes([index + 1]) * size


def test_memory_is_used_from_the_first_byte_to_the_release() -> None:
    size = 64 * mmap.PAGESIZE
    area = StagingArea([size, 3, size], releasable=True)

    def held_bytes() -> int:
        return os.stat(area.place(0).path).st_blocks * 512

    assert held_bytes() == 0
    area.view(0)[:] = bytes(size)
    area.view(1)[:] = b"abc"
    area.view(2)[0] = 1
    assert held_bytes() == size + 2 * mmap.PAGESIZE
    area.release(0)
    assert held_bytes() == 2 * mmap.PAGESIZE
    assert bytes(area.view(1)) == b"abc"
    with pytest.raises(AssertionError, match="share pages"):
        StagingArea([1, 1]).release(0)


def test_the_file_goes_with_the_area_and_a_view_stays() -> None:
    area = StagingArea([3])
    area.view(0)[:] = b"abc"
    path, view = area.place(0).path, area.view(0)
    del area
    assert not os.path.exists(path)
    assert bytes(view) == b"abc"
