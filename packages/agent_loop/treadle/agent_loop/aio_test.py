"""Tests of the task helpers."""

import asyncio

import pytest

from treadle.agent_loop.aio import concurrently, run_shielded

pytestmark = pytest.mark.asyncio


async def test_shielded_work_ends_before_the_cancellation_is_raised() -> None:
    started, gate = asyncio.Event(), asyncio.Event()
    done = []

    async def work() -> None:
        started.set()
        await gate.wait()
        done.append(True)

    caller = asyncio.create_task(run_shielded(work(), timeout_s=60))
    await started.wait()
    caller.cancel()
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done == [True]


async def test_shielded_work_gives_its_result_or_error() -> None:
    async def fail() -> None:
        raise OSError("no")

    async def five() -> int:
        return 5

    assert await run_shielded(five(), timeout_s=60) == 5
    with pytest.raises(OSError, match="no"):
        await run_shielded(fail(), timeout_s=60)


async def test_shielded_work_is_bounded() -> None:
    with pytest.raises(TimeoutError):
        await run_shielded(asyncio.Event().wait(), timeout_s=0.01)


async def test_concurrently_keeps_the_order_and_raises_the_failure_itself() -> None:
    gate = asyncio.Event()

    async def late() -> str:
        await gate.wait()
        return "late"

    async def early() -> str:
        gate.set()
        return "early"

    async def fail() -> str:
        raise OSError("no")

    assert await concurrently([late(), early()]) == ["late", "early"]
    gate.clear()
    with pytest.raises(OSError, match="no"):
        await concurrently([late(), fail()])
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_single_coroutine_runs_in_the_callers_task() -> None:
    async def current() -> object:
        return asyncio.current_task()

    async def fail() -> None:
        raise OSError("no")

    assert await concurrently([current()]) == [asyncio.current_task()]
    assert await concurrently([]) == []
    with pytest.raises(OSError, match="no"):
        await concurrently([fail()])
