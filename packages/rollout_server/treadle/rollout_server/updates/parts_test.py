"""What an engine that can `split_tensors` is handed, whatever the pieces in which bytes come."""

import asyncio
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.rollout_server.engine import ElementType, FilePlace, NamedTensor, TensorSpec
from treadle.rollout_server.updates.weight_update import WeightUpdate

TENSORS = (
    TensorSpec(name="a", element_type=ElementType.FLOAT32, shape=(5,)),
    TensorSpec(name="b", element_type=ElementType.BFLOAT16, shape=(2, 3)),
    TensorSpec(name="c", element_type=ElementType.FLOAT8_E4M3FN, shape=(0,)),
    TensorSpec(name="d", element_type=ElementType.FLOAT8_E4M3FN, shape=(7,)),
)
PLACE = FilePlace(path="/proc/1/fd/1", offset=0)


def content(index: int) -> bytes:
    return bytes(range(50 * index, 50 * index + TENSORS[index].size_bytes))


async def _handed(update: WeightUpdate) -> list[tuple[NamedTensor, bytes]]:
    """What the engine is given, and the bytes as they are while they are good."""
    assert update.tensor_queue is not None
    return [(tensor, bytes(tensor.data)) async for tensor in update.tensor_queue.tensors()]


def _live(*, split_tensors: bool) -> WeightUpdate:
    return WeightUpdate(
        update_id="u",
        weight_version=1,
        tensors=TENSORS,
        lease_s=10,
        max_chunk_bytes=64,
        now=0,
        in_place=True,
        split_tensors=split_tensors,
    )


@given(pieces=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.booleans()), max_size=40))
def test_every_element_is_handed_over_once_and_in_order(
    pieces: list[tuple[int, int, bool]],
) -> None:
    update = _live(split_tensors=True)
    pieces += [(index, 9, False) for index in range(4) for _ in range(3)]
    for index, size, lent in pieces:
        offset = update.received[index]
        data = bytearray(content(index)[offset : offset + size])
        if not data:
            continue
        if lent:
            update.lend(index, offset, memoryview(data), PLACE, done=lambda: None, now=0)
        else:
            update.accept(index, offset, zlib.crc32(data), bytes(data), now=0)
    update.begin_commit()
    held = {spec.name: b"" for spec in TENSORS}
    for part, handed in asyncio.run(_handed(update)):
        assert part.offset == len(held[part.spec.name])
        assert len(handed) % part.spec.element_type.size_bytes == 0
        assert not part.data.readonly
        held[part.spec.name] += handed
    assert held == {spec.name: content(index) for index, spec in enumerate(TENSORS)}


def test_another_engine_is_handed_whole_tensors_that_its_workers_can_map() -> None:
    update = _live(split_tensors=False)
    for index, spec in enumerate(TENSORS):
        for offset in range(0, spec.size_bytes, 4):
            data = content(index)[offset : offset + 4]
            update.accept(index, offset, zlib.crc32(data), data, now=0)
    update.begin_commit()
    handed = asyncio.run(_handed(update))
    assert sorted((tensor.spec.name, data) for tensor, data in handed) == [
        (spec.name, content(index)) for index, spec in enumerate(TENSORS)
    ]
    assert all(tensor.place is not None for tensor, _ in handed)


@pytest.mark.parametrize("split_tensors", [False, True])
def test_tensors_from_files_are_handed_over_once_and_whole(split_tensors: bool) -> None:
    update = _live(split_tensors=split_tensors)
    for index in range(len(TENSORS)):
        update.assembler.write(index, 0, content(index))
        update.filled(index)
    update.begin_commit()
    handed = asyncio.run(_handed(update))
    assert sorted((tensor.spec.name, data) for tensor, data in handed) == [
        (spec.name, content(index)) for index, spec in enumerate(TENSORS)
    ]
