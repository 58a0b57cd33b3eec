"""What an engine gets in place, whatever the pieces in which the bytes arrive."""

import asyncio
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.rollout_server.engine import (
    ElementType,
    FilePlace,
    InFlightPolicy,
    NamedTensor,
    TensorSpec,
)
from treadle.rollout_server.updates.begin import Begin
from treadle.rollout_server.updates.incoming import IncomingTensors

TENSORS = (
    TensorSpec(name="a", element_type=ElementType.FLOAT32, shape=(5,)),
    TensorSpec(name="b", element_type=ElementType.BFLOAT16, shape=(2, 3)),
    TensorSpec(name="c", element_type=ElementType.FLOAT8_E4M3FN, shape=(0,)),
    TensorSpec(name="d", element_type=ElementType.FLOAT8_E4M3FN, shape=(7,)),
)
PLACE = FilePlace(path="/proc/1/fd/1", offset=0)


def content(index: int) -> bytes:
    return bytes(range(50 * index, 50 * index + TENSORS[index].size_bytes))


async def _queued(incoming: IncomingTensors) -> list[tuple[NamedTensor, bytes]]:
    """Returns what the engine gets, with a copy of the bytes while they are valid."""
    assert incoming.queue is not None
    return [(tensor, bytes(tensor.data)) async for tensor in incoming.queue.tensors()]


def _in_place(*, split_tensors: bool) -> IncomingTensors:
    begin = Begin(
        update_id="u",
        weight_version=1,
        tensors=TENSORS,
        lease_s=10,
        in_place=InFlightPolicy.DRAIN,
    )
    return IncomingTensors(begin, max_chunk_bytes=64, split_tensors=split_tensors)


@given(pieces=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.booleans()), max_size=40))
def test_every_element_is_queued_once_and_in_order(
    pieces: list[tuple[int, int, bool]],
) -> None:
    incoming = _in_place(split_tensors=True)
    pieces += [(index, 9, False) for index in range(4) for _ in range(3)]
    for index, size, lent in pieces:
        offset = incoming.received[index]
        data = bytearray(content(index)[offset : offset + size])
        if not data:
            continue
        if lent:
            incoming.lend(index, offset, memoryview(data), PLACE, owner=None)
        else:
            incoming.accept(index, offset, zlib.crc32(data), bytes(data))
    incoming.finish()
    held = {spec.name: b"" for spec in TENSORS}
    for part, queued in asyncio.run(_queued(incoming)):
        assert part.offset == len(held[part.spec.name])
        assert len(queued) % part.spec.element_type.size_bytes == 0
        assert not part.data.readonly
        held[part.spec.name] += queued
    assert held == {spec.name: content(index) for index, spec in enumerate(TENSORS)}


def test_another_engine_gets_whole_tensors_that_its_workers_can_map() -> None:
    incoming = _in_place(split_tensors=False)
    for index, spec in enumerate(TENSORS):
        for offset in range(0, spec.size_bytes, 4):
            data = content(index)[offset : offset + 4]
            incoming.accept(index, offset, zlib.crc32(data), data)
    incoming.finish()
    queued = asyncio.run(_queued(incoming))
    assert sorted((tensor.spec.name, data) for tensor, data in queued) == [
        (spec.name, content(index)) for index, spec in enumerate(TENSORS)
    ]
    assert all(tensor.place is not None for tensor, _ in queued)


@pytest.mark.parametrize("split_tensors", [False, True])
def test_tensors_from_files_are_queued_once_and_whole(split_tensors: bool) -> None:
    incoming = _in_place(split_tensors=split_tensors)
    for index in range(len(TENSORS)):
        incoming.assembler.write(index, 0, content(index))
        incoming.filled(index)
    incoming.finish()
    queued = asyncio.run(_queued(incoming))
    assert sorted((tensor.spec.name, data) for tensor, data in queued) == [
        (spec.name, content(index)) for index, spec in enumerate(TENSORS)
    ]
