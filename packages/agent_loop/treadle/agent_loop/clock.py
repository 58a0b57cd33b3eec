"""Clocks: time and waiting as an argument, so that tests control both."""

import asyncio
from typing import Protocol


class Clock(Protocol):
    """Time and waiting; `LoopClock`, or `testing.FakeClock`."""

    def now(self) -> float:
        """Returns seconds, on the scale of `RequestContext.deadline`."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Waits for `seconds`."""
        ...


class LoopClock:
    """The running event loop's clock."""

    def now(self) -> float:
        """Returns `loop.time()`."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Waits for `seconds` of real time."""
        await asyncio.sleep(seconds)
