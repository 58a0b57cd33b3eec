import asyncio
from collections.abc import AsyncIterator

import pytest

from treadle.rollout_server.engine import ElementType, NamedTensor, TensorSpec
from treadle.rollout_server.errors import UpdateUnknown
from treadle.rollout_server.updates.tensor_queue import TensorQueue


def tensor(name: str) -> NamedTensor:
    spec = TensorSpec(name=name, element_type=ElementType.FLOAT8_E4M3FN, shape=(1,))
    return NamedTensor(spec=spec, data=memoryview(bytearray(1)))


@pytest.mark.asyncio
async def test_a_stream_waits_until_the_engine_takes_a_tensor_or_is_done_with_it() -> None:
    queue, freed = TensorQueue(), asyncio.Event()
    tensors = queue.tensors()
    await queue.room()
    queue.put(tensor("a"), done=freed.set)
    room = asyncio.ensure_future(queue.room())
    caught_up = asyncio.ensure_future(queue.caught_up())
    await asyncio.sleep(0)
    assert not room.done()
    assert (await anext(tensors)).spec.name == "a"
    await room
    assert not freed.is_set() and not caught_up.done()
    asking = asyncio.ensure_future(anext(tensors, None))
    await caught_up
    assert freed.is_set()
    queue.finish()
    assert await asking is None


@pytest.mark.asyncio
async def test_tensors_come_once_and_in_order() -> None:
    queue = TensorQueue()
    for name in "abc":
        queue.put(tensor(name))
    queue.finish()
    assert [one.spec.name async for one in queue.tensors()] == ["a", "b", "c"]


@pytest.mark.asyncio
async def test_closing_wakes_everyone_with_the_error() -> None:
    queue = TensorQueue()

    async def read(tensors: AsyncIterator[NamedTensor]) -> None:
        async for _ in tensors:
            pass

    waiting = asyncio.ensure_future(read(queue.tensors()))
    await asyncio.sleep(0)
    queue.put(tensor("a"))
    streams = [
        asyncio.ensure_future(queue.room()),
        asyncio.ensure_future(queue.caught_up()),
    ]
    queue.close(UpdateUnknown("u", "was aborted"))
    for task in (waiting, *streams):
        with pytest.raises(UpdateUnknown, match="'u' was aborted"):
            await task
