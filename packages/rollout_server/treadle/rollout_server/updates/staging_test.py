import mmap
import os
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.rollout_server.engine import ElementType, TensorSpec
from treadle.rollout_server.errors import ChunkCorrupt, ChunkOutOfOrder, InvalidField
from treadle.rollout_server.updates.staging import Assembler, StagingArea

MAX_CHUNK = 7


def specs(sizes: list[int]) -> list[TensorSpec]:
    return [
        TensorSpec(name=f"t{i}", element_type=ElementType.FLOAT8_E4M3FN, shape=(size,))
        for i, size in enumerate(sizes)
    ]


def content(index: int, size: int) -> bytes:
    return bytes((index * 31 + byte * 7) % 256 for byte in range(size))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.data())
def test_any_order_and_any_repeats_give_the_same_bytes(
    sizes: list[int], data: st.DataObject
) -> None:
    assembler = Assembler(specs(sizes), max_chunk_bytes=MAX_CHUNK)
    whole = [content(index, size) for index, size in enumerate(sizes)]
    while missing := assembler.missing():
        index = data.draw(st.sampled_from(missing))
        offset = data.draw(st.integers(0, sizes[index] - 1))
        part = whole[index][offset : offset + data.draw(st.integers(1, MAX_CHUNK))]
        before = assembler.received
        if data.draw(st.booleans()):
            with pytest.raises((ChunkCorrupt, ChunkOutOfOrder)):
                assembler.accept(index, offset, zlib.crc32(part) ^ 1, part)
            assert assembler.received == before
        try:
            whole_now = assembler.accept(index, offset, zlib.crc32(part), part)
        except ChunkOutOfOrder as error:
            assert error.expected_offset == before[index] != offset
            resumed = whole[index][before[index] :][:MAX_CHUNK]
            assembler.accept(index, before[index], zlib.crc32(resumed), resumed)
        else:
            assert whole_now == (offset + len(part) == sizes[index])
    assert [bytes(tensor.data) for tensor in assembler.named_tensors()] == whole
    assert [tensor.spec for tensor in assembler.named_tensors()] == specs(sizes)


@pytest.mark.parametrize(
    ("index", "data", "message"),
    [
        (2, b"x", "tensor_index is 2, expected below 2"),
        (0, b"", "data is 0 bytes"),
        (0, b"x" * 8, "chunk.data is 8 bytes, expected 1 to 7"),
        (1, b"xxxx", "1 to the 3 bytes that are missing"),
    ],
)
def test_a_chunk_that_has_no_place_is_refused(index: int, data: bytes, message: str) -> None:
    assembler = Assembler(specs([9, 3]), max_chunk_bytes=MAX_CHUNK)
    with pytest.raises(InvalidField, match=message):
        assembler.accept(index, 0, zlib.crc32(data), data)
    assert assembler.received == (0, 0)


def test_a_scalar_has_one_element_and_an_empty_tensor_is_complete() -> None:
    scalar = TensorSpec(name="s", element_type=ElementType.BFLOAT16, shape=())
    empty = TensorSpec(name="e", element_type=ElementType.FLOAT32, shape=(0, 4))
    assembler = Assembler([scalar, empty], max_chunk_bytes=MAX_CHUNK)
    assert assembler.missing() == (0,)
    assembler.accept(0, 0, zlib.crc32(b"ab"), b"ab")
    assert assembler.missing() == ()


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


@pytest.mark.parametrize("size", [1 << 47, 1 << 62, 1 << 63, 1 << 70])
def test_more_bytes_than_a_process_can_map_are_the_callers_mistake(size: int) -> None:
    with pytest.raises(InvalidField, match=f"tensors is {size} bytes, expected as much as"):
        StagingArea([size])
