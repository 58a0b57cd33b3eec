import asyncio
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch

from treadle.rollout_server.engines.torch.compute_thread import ComputeThread
from treadle.rollout_server.errors import EngineFailed


class Countdown:
    """Takes so many turns, tells each to the loop, and raises at the end if told to."""

    def __init__(self, turns: int, error: Exception | None = None) -> None:
        self.left = turns
        self.error = error
        self.told: list[object] = []
        self.ended = asyncio.Event()
        self._outbox: list[Callable[[], None]] = []

    @property
    def runnable(self) -> bool:
        return self.left > 0

    def step(self) -> None:
        assert torch.is_inference_mode_enabled()
        left = self.left = self.left - 1
        self._outbox.append(lambda: self.told.append(left))
        if not left:
            if self.error is not None:
                raise self.error
            self._outbox.append(self.ended.set)

    def take_outbox(self) -> list[Callable[[], None]]:
        outbox, self._outbox = self._outbox, []
        return outbox

    def fail(self, error: BaseException) -> None:
        self._outbox.append(lambda: self.told.append(error))
        self._outbox.append(self.ended.set)


@pytest.mark.asyncio
async def test_calls_run_in_order_on_the_one_thread() -> None:
    thread = ComputeThread("compute")
    ran: list[tuple[int, str]] = []

    def note(number: int) -> None:
        ran.append((number, threading.current_thread().name))

    await asyncio.gather(*[thread.call(partial(note, number)) for number in range(5)])
    assert ran == [(number, "compute") for number in range(5)]
    await thread.aclose()


@pytest.mark.asyncio
async def test_a_call_that_raises_fails_its_caller_only() -> None:
    thread = ComputeThread("compute")
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda: 1 // 0)
    assert await thread.call(lambda: 7) == 7
    await thread.aclose()


@pytest.mark.asyncio
async def test_turns_are_taken_until_there_is_nothing_to_do() -> None:
    thread, turns = ComputeThread("compute"), Countdown(3)
    await thread.run_steps(turns)
    await turns.ended.wait()
    assert turns.told == [2, 1, 0]
    await thread.aclose()


@pytest.mark.asyncio
async def test_calls_come_between_turns() -> None:
    thread, turns = ComputeThread("compute"), Countdown(1_000_000_000)
    await thread.run_steps(turns)
    seen = [await thread.call(lambda: turns.left) for _ in range(5)]
    assert seen == sorted(seen, reverse=True)
    await thread.call(lambda: setattr(turns, "left", 0))
    await thread.aclose()


@pytest.mark.asyncio
async def test_a_cancelled_call_still_runs() -> None:
    thread = ComputeThread("compute")
    may_go, ran = threading.Event(), threading.Event()
    blocking = asyncio.ensure_future(thread.call(may_go.wait))
    cancelled = asyncio.ensure_future(thread.call(ran.set))
    blocking_started = asyncio.ensure_future(asyncio.to_thread(may_go.is_set))
    await blocking_started
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    may_go.set()
    assert await blocking
    await thread.aclose()
    assert ran.is_set()


@pytest.mark.asyncio
async def test_a_turn_that_raises_breaks_the_thread_and_every_call() -> None:
    thread, cause = ComputeThread("compute"), RuntimeError("out of memory")
    turns = Countdown(1, cause)
    with thread.open_call() as waiting:
        await thread.run_steps(turns)
        await turns.ended.wait()
        with pytest.raises(EngineFailed, match="out of memory"):
            await waiting
    assert turns.told == [0, cause]
    with pytest.raises(EngineFailed, match="out of memory"):
        await thread.call(lambda: 7)
    await thread.aclose()


@pytest.mark.asyncio
async def test_closing_lets_earlier_calls_end_and_may_be_repeated() -> None:
    thread = ComputeThread("compute")
    earlier = asyncio.ensure_future(thread.call(lambda: 7))
    closing = asyncio.ensure_future(thread.aclose())
    assert await earlier == 7
    await closing
    await thread.aclose()
