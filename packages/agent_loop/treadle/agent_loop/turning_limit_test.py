"""Tests of the limit that counts only the time in which the event loop turned."""

import asyncio
import time

import pytest

from treadle.agent_loop import turning_limit
from treadle.agent_loop.testing.fake_clock import let_pass
from treadle.agent_loop.turning_limit import TurningLimit


@pytest.fixture
def _moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Blocks, "moved_s", 0.0)
    monkeypatch.setattr(turning_limit, "_now", lambda: time.monotonic() + _Blocks.moved_s)


class _Blocks:
    """Code that holds the event loop: the clock goes on, and the loop does not."""

    moved_s = 0.0

    def __init__(self, seconds: float) -> None:
        let_pass(seconds)
        _Blocks.moved_s += seconds


async def _limited(*steps: float, error: Exception | None = None) -> str:
    """Runs code that blocks in each step, and says how it ended within 2 s."""

    async def work() -> None:
        for step in steps:
            if step:
                _Blocks(step)
            await asyncio.sleep(0)
        if error is not None:
            raise error

    limit = TurningLimit(2.0)
    try:
        async with limit:
            await limit.own(work())
    except (KeyError, TimeoutError) as raised:
        return f"expired: {limit.expired}" if isinstance(raised, TimeoutError) else repr(raised)
    return "ended"


@pytest.mark.asyncio
@pytest.mark.usefixtures("_moved")
async def test_only_code_that_blocks_for_longer_than_its_limit_is_late() -> None:
    """Found by an attacker: one tool that blocked gave all others a time limit's text."""
    told = await asyncio.gather(
        _limited(0, 0, 0), _limited(3.0), _limited(0, 0, error=KeyError("a")), _limited(1.5, 0)
    )
    assert list(told) == ["ended", "expired: True", "KeyError('a')", "ended"]


@pytest.mark.asyncio
@pytest.mark.usefixtures("_moved")
async def test_many_that_block_shortly_are_not_late_together() -> None:
    told = await asyncio.gather(*(_limited(0.05, 0, 0) for _ in range(128)))
    assert set(told) == {"ended"}


@pytest.mark.asyncio
@pytest.mark.usefixtures("_moved")
async def test_an_error_of_the_code_is_no_timeout_however_late() -> None:
    assert await _limited(3.0, error=KeyError("b")) == "KeyError('b')"


@pytest.mark.asyncio
async def test_code_that_waits_is_cancelled_at_its_limit() -> None:
    limit = TurningLimit(60.0)
    cancelled = asyncio.Event()

    async def work() -> None:
        let_pass(60.0)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError):
        async with limit:
            await limit.own(work())
    assert limit.expired
    assert cancelled.is_set()


@pytest.mark.asyncio
async def test_without_a_limit_nothing_expires() -> None:
    async with TurningLimit(None) as limit:
        let_pass(1e9)
        assert await limit.own(asyncio.sleep(0, "done")) == "done"
