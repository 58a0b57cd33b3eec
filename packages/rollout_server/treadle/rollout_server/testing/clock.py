"""A clock that moves only when a test advances it."""

import heapq
import itertools
from collections.abc import Callable


class FakeTimer:
    """A timer of a `FakeClock`."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Cancels the callback."""
        self.callback = None


class FakeClock:
    """A `treadle.rollout_server.clock.Clock` that tests advance.

    Timers run inside `advance`, in order of time; `time()` is then the time of the timer.
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._order = itertools.count()
        self._timers: list[tuple[float, int, FakeTimer]] = []

    def time(self) -> float:
        """Returns the current time."""
        return self._now

    def call_at(self, when: float, callback: Callable[[], None], /) -> FakeTimer:
        """Schedules a callback for `advance`."""
        timer = FakeTimer(callback)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    @property
    def next_timer(self) -> float | None:
        """Time of the earliest timer; None without one."""
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def advance(self, seconds: float) -> None:
        """Advances the time; runs every timer that is due."""
        end = self._now + seconds
        while (when := self.next_timer) is not None and when <= end:
            timer = heapq.heappop(self._timers)[2]
            self._now = max(self._now, when)
            callback, timer.callback = timer.callback, None
            assert callback is not None
            callback()
        self._now = end
