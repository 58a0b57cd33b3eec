import asyncio
import multiprocessing
import threading
import time
from multiprocessing.process import BaseProcess

import pytest

from treadle.rollout_server.engines.common.cancellable_startup import cancellable_startup

SPAWN = multiprocessing.get_context("spawn")


async def keep(_: object) -> None:
    raise AssertionError("nothing was built that could be discarded")


@pytest.mark.asyncio
async def test_what_is_built_is_returned_and_what_fails_is_raised() -> None:
    def fail() -> int:
        raise ValueError("no room")

    assert await cancellable_startup(lambda: 3, discard=keep) == 3
    with pytest.raises(ValueError, match="no room"):
        await cancellable_startup(fail, discard=keep)


@pytest.mark.asyncio
async def test_processes_started_after_the_waiting_was_given_up_are_ended() -> None:
    begun, given_up = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    processes: list[BaseProcess] = []

    def build() -> None:
        loop.call_soon_threadsafe(begun.set)
        given_up.wait()
        for _ in range(2):
            processes.append(SPAWN.Process(target=time.sleep, args=(3600,)))
            processes[-1].start()
            processes[-1].join()
        raise RuntimeError("its processes ended")

    waiting = asyncio.create_task(cancellable_startup(build, discard=keep))
    await begun.wait()
    waiting.cancel()
    given_up.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert [process.exitcode for process in processes] == [-9, -9]


@pytest.mark.asyncio
async def test_what_was_built_in_the_same_instant_is_discarded() -> None:
    begun, given_up = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    discarded: list[int] = []

    def build() -> int:
        loop.call_soon_threadsafe(begun.set)
        given_up.wait()
        return 7

    async def discard(number: int) -> None:
        discarded.append(number)

    waiting = asyncio.create_task(cancellable_startup(build, discard=discard))
    await begun.wait()
    waiting.cancel()
    given_up.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert discarded == [7]
