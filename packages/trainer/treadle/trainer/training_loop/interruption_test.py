import asyncio

import pytest

from treadle.trainer.training_loop.interruption import finished_first

pytestmark = pytest.mark.asyncio


class Step:
    """A step that ends when the test lets it."""

    def __init__(self) -> None:
        self.began, self.may_end = asyncio.Event(), asyncio.Event()
        self.said: list[str] = []
        self.ended = False

    async def work(self) -> str:
        self.began.set()
        await self.may_end.wait()
        self.ended = True
        return "done"

    async def begin(self) -> "asyncio.Task[str]":
        run = asyncio.create_task(finished_first(self.work(), say=self.said.append))
        await self.began.wait()
        return run


async def test_a_step_returns_what_it_returns() -> None:
    step = Step()
    run = await step.begin()
    step.may_end.set()
    assert await run == "done"
    assert step.said == []


async def test_an_interrupt_waits_for_the_step_and_ends_the_run() -> None:
    step = Step()
    run = await step.begin()
    run.cancel()
    await asyncio.sleep(0)
    assert not run.done()
    step.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert step.ended
    assert "interrupt again to end now" in step.said[0]


async def test_a_second_interrupt_ends_the_step() -> None:
    step = Step()
    run = await step.begin()
    for _ in range(2):
        run.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not step.ended


async def test_the_error_of_a_step_is_not_hidden_by_an_interrupt() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise RuntimeError("a rank was lost")

    run = asyncio.create_task(finished_first(fail(), say=[].append))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(RuntimeError, match="a rank was lost"):
        await run
