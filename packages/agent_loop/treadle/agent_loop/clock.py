"""Clocks: time and waiting as an argument, so that a test decides about both."""

import asyncio
from typing import Protocol


class Clock(Protocol):
    """Time and waiting; `LoopClock`, or `testing.FakeClock`."""

    def now(self) -> float:
        """Seconds, on the scale of `RequestContext.deadline`."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        ...


class LoopClock:
    """The running event loop's clock."""

    def now(self) -> float:
        """`loop.time()`."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Waits by real time."""
        await asyncio.sleep(seconds)
