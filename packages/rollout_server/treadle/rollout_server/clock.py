"""The clock: how code reads the time and sets timers.

Invariant: the server does both only through a `Clock`, so a test with `testing.FakeClock` decides
when each timer fires and no test sleeps. The running event loop is a `Clock`.
"""

from collections.abc import Callable
from typing import Protocol


class TimerHandle(Protocol):
    """A callback that has not run yet."""

    def cancel(self) -> None:
        """Keeps the callback from running; does nothing after it ran."""


class Clock(Protocol):
    """Monotonic seconds, and timers in them."""

    def time(self) -> float:
        """Returns the seconds since an arbitrary instant."""

    def call_at(self, when: float, callback: Callable[[], None], /) -> TimerHandle:
        """Runs `callback` on the event loop once `time()` reaches `when`."""
