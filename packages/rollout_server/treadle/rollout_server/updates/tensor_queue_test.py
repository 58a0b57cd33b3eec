import asyncio
from collections.abc import AsyncIterator

import pytest

from treadle.rollout_server.engine import ElementType, NamedTensor, TensorSpec
from treadle.rollout_server.errors import UpdateUnknown
from treadle.rollout_server.updates.tensor_queue import HandOver


def tensor(name: str) -> NamedTensor:
    spec = TensorSpec(name=name, element_type=ElementType.FLOAT8_E4M3FN, shape=(1,))
    return NamedTensor(spec=spec, data=memoryview(bytearray(1)))


@pytest.mark.asyncio
async def test_a_giver_waits_until_the_engine_takes_and_then_until_it_is_done() -> None:
    hand_over, freed = HandOver(), asyncio.Event()
    tensors = hand_over.tensors()
    await hand_over.room()
    hand_over.put(tensor("a"), freed.set)
    room = asyncio.ensure_future(hand_over.room())
    caught_up = asyncio.ensure_future(hand_over.caught_up())
    await asyncio.sleep(0)
    assert not room.done()
    assert (await anext(tensors)).spec.name == "a"
    await room
    assert not freed.is_set() and not caught_up.done()
    asking = asyncio.ensure_future(anext(tensors, None))
    await caught_up
    assert freed.is_set()
    hand_over.finish()
    assert await asking is None


@pytest.mark.asyncio
async def test_tensors_come_once_and_in_order() -> None:
    hand_over = HandOver()
    for name in "abc":
        hand_over.put(tensor(name), lambda: None)
    hand_over.finish()
    assert [one.spec.name async for one in hand_over.tensors()] == ["a", "b", "c"]


@pytest.mark.asyncio
async def test_closing_wakes_everyone_with_the_error() -> None:
    hand_over = HandOver()

    async def read(tensors: AsyncIterator[NamedTensor]) -> None:
        async for _ in tensors:
            pass

    waiting = asyncio.ensure_future(read(hand_over.tensors()))
    await asyncio.sleep(0)
    hand_over.put(tensor("a"), lambda: None)
    giving = [asyncio.ensure_future(hand_over.room()), asyncio.ensure_future(hand_over.caught_up())]
    hand_over.close(UpdateUnknown("u", "was aborted"))
    for task in (waiting, *giving):
        with pytest.raises(UpdateUnknown, match="'u' was aborted"):
            await task
