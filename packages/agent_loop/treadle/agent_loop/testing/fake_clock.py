"""A clock that only the test moves, and a way to move the event loop's own time.

Invariant: `sleep` ends when `advance` has moved the clock past its end, in the order of the ends,
and never by real time. `let_pass` is for code that uses the event loop's time.
"""

import asyncio
import heapq
import itertools


class FakeClock:
    """A clock and its sleepers; replaces `clock.LoopClock`.

    Args:
        now: The time at the start, in seconds.

    Attributes:
        slept: The argument of each `sleep` so far.
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._changed = asyncio.Condition()
        self.slept: list[float] = []

    def now(self) -> float:
        """Returns the time in seconds."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Waits until the clock has moved by `seconds`."""
        self.slept.append(seconds)
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), woken))
        async with self._changed:
            self._changed.notify_all()
        await woken

    async def until_sleeping(self, count: int) -> None:
        """Waits until at least `count` tasks sleep."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: sum(not s[2].done() for s in self._sleepers) >= count
            )

    async def advance(self, seconds: float) -> None:
        """Moves the clock and wakes the sleepers that are due."""
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
        await asyncio.sleep(0)


def let_pass(seconds: float) -> None:
    """Moves the running event loop's time forward, so that deadlines within it have passed."""
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + seconds  # type: ignore[method-assign]
