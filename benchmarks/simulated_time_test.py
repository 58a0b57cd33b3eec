"""Simulated time passes only where nothing else can, and no error is lost."""

import asyncio

import pytest
from simulated_time import run


def test_timers_happen_in_their_order_at_their_time() -> None:
    happened: list[tuple[str, float]] = []

    async def note(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        happened.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(note("a week", 604_800.0), note("a day", 86_400.0), note("now", 0.0))

    run(main())
    assert happened == [("now", 0.0), ("a day", 86_400.0), ("a week", 604_800.0)]


def test_a_run_in_which_nothing_is_left_to_happen_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="nothing is left to happen"):
        run(asyncio.Event().wait())


def test_an_error_of_a_timer_ends_the_run() -> None:
    def fail() -> None:
        raise ValueError("of a timer")

    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, fail)
        await asyncio.sleep(2.0)

    with pytest.raises(ValueError, match="of a timer"):
        run(main())
