"""The pauses of an engine: when it kept running sequences without sampling, as for new weights.

Invariant: pauses do not overlap and are linked in order of time. A call keeps the pause that was
the last one when it began; the pauses since then hang on it, and older ones are freed with the
oldest call. Nobody waits here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from treadle.rollout_server.clock import Clock


@dataclass(slots=True, eq=False)
class Pause:
    """One pause.

    Attributes:
        start: Time of the clock in seconds.
        stop: Clock seconds; None while it lasts.
    """

    start: float
    stop: float | None
    next: Pause | None = None

    def since(self, start: float, stop: float) -> Iterator[tuple[float, float]]:
        """Yields the parts of this pause and of later ones between two times, in order."""
        pause: Pause | None = self
        while pause is not None:
            first = max(start, pause.start)
            last = stop if pause.stop is None else min(stop, pause.stop)
            if first < last:
                yield first, last
            pause = pause.next


class Pauses:
    """The pauses of one engine.

    Attributes:
        last: The latest pause; one of no length before the first.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        now = clock.time()
        self.last = Pause(now, now)

    def begin(self) -> None:
        """The engine keeps its sequences and samples nothing. Does nothing if it does already."""
        if self.last.stop is not None:
            self.last.next = Pause(self._clock.time(), None)
            self.last = self.last.next

    def end(self) -> None:
        """The engine samples, or ends its sequences. Does nothing outside of a pause."""
        if self.last.stop is None:
            self.last.stop = self._clock.time()
