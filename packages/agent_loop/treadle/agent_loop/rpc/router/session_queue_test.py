"""Tests of the session queue: who waits, who is woken, and what happens when a waiter leaves."""

import asyncio
import math
import re

import pytest

from treadle.agent_loop import StickySession
from treadle.agent_loop.rpc.router.session_queue import SessionQueue
from treadle.agent_loop.testing import FakeClock

pytestmark = pytest.mark.asyncio


def make_queue(*addresses: str, lease_s: float | None = None) -> tuple[SessionQueue, FakeClock]:
    clock = FakeClock()
    router = StickySession(addresses, cache_tokens=10)
    return SessionQueue(router, clock=clock, lease_s=lease_s), clock


async def start(queue: SessionQueue, session: str, tokens: int) -> "asyncio.Task[str | None]":
    """Begins to ask, and lets the asker get as far as it can."""
    task = asyncio.create_task(queue.open(session, context_tokens=tokens, wait_s=math.inf))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_who_finds_no_room_waits_for_a_session_to_finish_oldest_first() -> None:
    queue, _ = make_queue("a")
    assert await queue.open("s0", context_tokens=8, wait_s=1) == "a"
    first, second = await start(queue, "s1", 8), await start(queue, "s2", 2)
    queue.finish("s0")
    assert await first == "a"
    assert await second == "a"


@pytest.mark.parametrize("how", ["add", "finish_other"])
async def test_a_replica_that_comes_makes_room(how: str) -> None:
    queue, _ = make_queue("a")
    await queue.open("s0", context_tokens=8, wait_s=1)
    waiting = await start(queue, "s1", 8)
    assert not waiting.done()
    if how == "add":
        queue.add("b")
    else:
        queue.finish("s0")
    assert await waiting == ("b" if how == "add" else "a")


async def test_who_gives_up_holds_nobody_up() -> None:
    queue, _ = make_queue("a")
    await queue.open("s0", context_tokens=8, wait_s=1)
    first, second = await start(queue, "s1", 8), await start(queue, "s2", 2)
    first.cancel()
    await asyncio.wait([first])
    assert await second == "a"


async def test_a_waiter_that_blocks_its_parent_proceeds_after_the_stall_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A conversation holds all the room and waits for its sub-agents, which wait for room."""
    queue, clock = make_queue("a")
    await queue.open("parent", context_tokens=8, wait_s=1)
    first = await start(queue, "first child", 8)
    await clock.advance(29)
    second = await start(queue, "second child", 8)
    assert not first.done()
    await clock.advance(1)
    third = await start(queue, "third child", 8)
    assert await first == "a"
    assert re.search("[23] are waiting: first child proceeds without room", caplog.text)
    for waiting in (second, third):
        assert not waiting.done()
        waiting.cancel()


async def test_no_room_in_time_is_a_timeout_and_the_turn_is_kept() -> None:
    queue, _ = make_queue("a")
    await queue.open("s0", context_tokens=8, wait_s=1)
    with pytest.raises(TimeoutError):
        await queue.open("s1", context_tokens=8, wait_s=0)
    later = await start(queue, "s2", 8)
    again = await start(queue, "s1", 8)
    queue.finish("s0")
    assert await again == "a"
    assert not later.done()
    queue.finish("s1")
    assert await later == "a"


async def test_no_replica_is_said_to_those_who_wait_too() -> None:
    queue, _ = make_queue("a")
    await queue.open("s0", context_tokens=8, wait_s=1)
    waiting = await start(queue, "s1", 8)
    queue.remove("a")
    assert await waiting is None
    assert await queue.open("s0", context_tokens=8, wait_s=1) is None


async def test_a_session_that_nobody_asks_for_is_finished_after_its_lease() -> None:
    queue, clock = make_queue("a", lease_s=60)
    await queue.open("dead", context_tokens=4, wait_s=1)
    await queue.open("alive", context_tokens=4, wait_s=1)
    await clock.advance(50)
    await queue.open("alive", context_tokens=4, wait_s=1)
    await clock.advance(20)
    assert await queue.open("new", context_tokens=6, wait_s=0) == "a"
    assert not queue.close("dead")
    assert queue.close("alive")


async def test_without_a_lease_a_session_is_open_until_it_is_finished() -> None:
    queue, clock = make_queue("a")
    await queue.open("s0", context_tokens=4, wait_s=1)
    await clock.advance(1e9)
    await queue.open("s1", context_tokens=4, wait_s=1)
    assert queue.close("s0")


async def test_a_replica_is_occupied_while_it_has_sessions() -> None:
    queue, clock = make_queue("a", "b")
    await queue.open("s0", context_tokens=1, wait_s=1)  # at a
    await clock.advance(2)
    await queue.open("s1", context_tokens=1, wait_s=1, avoid=["b"])  # at a too
    await clock.advance(3)
    queue.finish("s0")
    await clock.advance(4)
    assert await queue.open("s1", context_tokens=1, wait_s=1, avoid=["a"]) == "b"  # it moves
    await clock.advance(5)
    assert queue.occupancy.seconds() == {"a": 9.0, "b": 5.0}
    queue.remove("b")
    await clock.advance(6)
    assert queue.occupancy.seconds() == {"a": 9.0, "b": 5.0}
    assert await queue.open("s1", context_tokens=1, wait_s=1) == "a"
    await clock.advance(1)
    assert queue.occupancy.seconds() == {"a": 10.0, "b": 5.0}
