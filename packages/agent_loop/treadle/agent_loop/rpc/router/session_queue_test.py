"""Who waits at the desk, who is woken, and what becomes of those that leave."""

import asyncio
import math

import pytest

from treadle.agent_loop import StickySession
from treadle.agent_loop.rpc.router.session_queue import RouterDesk
from treadle.agent_loop.testing import FakeClock

pytestmark = pytest.mark.asyncio


def make_desk(*addresses: str, lease_s: float | None = None) -> tuple[RouterDesk, FakeClock]:
    clock = FakeClock()
    router = StickySession(addresses, cache_tokens=10)
    return RouterDesk(router, clock=clock, lease_s=lease_s), clock


async def start(desk: RouterDesk, session: str, tokens: int) -> "asyncio.Task[str | None]":
    """Begins to ask, and lets the asker get as far as it can."""
    task = asyncio.create_task(desk.open(session, context_tokens=tokens, wait_s=math.inf))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_who_finds_no_room_waits_for_a_session_to_finish_oldest_first() -> None:
    desk, _ = make_desk("a")
    assert await desk.open("s0", context_tokens=8, wait_s=1) == "a"
    first, second = await start(desk, "s1", 8), await start(desk, "s2", 2)
    desk.finish("s0")
    assert await first == "a"
    assert await second == "a"


@pytest.mark.parametrize("how", ["add", "finish_other"])
async def test_a_replica_that_comes_makes_room(how: str) -> None:
    desk, _ = make_desk("a")
    await desk.open("s0", context_tokens=8, wait_s=1)
    waiting = await start(desk, "s1", 8)
    assert not waiting.done()
    if how == "add":
        desk.add("b")
    else:
        desk.finish("s0")
    assert await waiting == ("b" if how == "add" else "a")


async def test_who_gives_up_holds_nobody_up() -> None:
    desk, _ = make_desk("a")
    await desk.open("s0", context_tokens=8, wait_s=1)
    first, second = await start(desk, "s1", 8), await start(desk, "s2", 2)
    first.cancel()
    await asyncio.wait([first])
    assert await second == "a"


async def test_who_waits_for_a_place_that_waits_for_it_goes_on_after_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A conversation holds all the room and waits for its sub-agents, which wait for room."""
    desk, clock = make_desk("a")
    await desk.open("parent", context_tokens=8, wait_s=1)
    first = await start(desk, "first child", 8)
    await clock.advance(29)
    second = await start(desk, "second child", 8)
    assert not first.done()
    await clock.advance(1)
    third = await start(desk, "third child", 8)
    assert await first == "a"
    assert "2 wait: first child goes on" in caplog.text or "3 wait: first child" in caplog.text
    for waiting in (second, third):
        assert not waiting.done()
        waiting.cancel()


async def test_no_room_in_time_is_a_timeout_and_the_turn_is_kept() -> None:
    desk, _ = make_desk("a")
    await desk.open("s0", context_tokens=8, wait_s=1)
    with pytest.raises(TimeoutError):
        await desk.open("s1", context_tokens=8, wait_s=0)
    later = await start(desk, "s2", 8)
    again = await start(desk, "s1", 8)
    desk.finish("s0")
    assert await again == "a"
    assert not later.done()
    desk.finish("s1")
    assert await later == "a"


async def test_no_replica_is_said_to_those_who_wait_too() -> None:
    desk, _ = make_desk("a")
    await desk.open("s0", context_tokens=8, wait_s=1)
    waiting = await start(desk, "s1", 8)
    desk.remove("a")
    assert await waiting is None
    assert await desk.open("s0", context_tokens=8, wait_s=1) is None


async def test_a_session_that_nobody_asks_for_is_finished_after_its_lease() -> None:
    desk, clock = make_desk("a", lease_s=60)
    await desk.open("dead", context_tokens=4, wait_s=1)
    await desk.open("alive", context_tokens=4, wait_s=1)
    await clock.advance(50)
    await desk.open("alive", context_tokens=4, wait_s=1)
    await clock.advance(20)
    assert await desk.open("new", context_tokens=6, wait_s=0) == "a"
    assert not desk.close("dead")
    assert desk.close("alive")


async def test_without_a_lease_a_session_is_open_until_it_is_finished() -> None:
    desk, clock = make_desk("a")
    await desk.open("s0", context_tokens=4, wait_s=1)
    await clock.advance(1e9)
    await desk.open("s1", context_tokens=4, wait_s=1)
    assert desk.close("s0")
