"""The watchdog: says which trajectories stand still, and what they last did.

Invariant: a stall is reported once, when nothing has happened in a trajectory for `limit_s`, and
again only after something has. Every trajectory carries its own reports; the log names the first
few, because behind one cause there may be a thousand. It ends nothing: deadlines do that. Nothing
runs while there is nothing to watch, and between two looks it sleeps until the first trajectory
could be late.

    async with Watchdog(limit_s=120.0) as watchdog:
        with watchdog.watch("task train/7, rollout 0") as pulse:
            pulse.beat("waiting for tools: ['search']")
            ...
        pulse.stalls            # what was reported

The loops beat the pulse in `Services`; the watchdog's one task waits for the clock, or for a
trajectory to begin or go on.
"""

import asyncio
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from treadle.agent_loop.clock import Clock, LoopClock

_logger = logging.getLogger(__name__)
_MAX_LOGGED = 5


class Pulse:
    """The last sign of life of one trajectory.

    Args:
        name: Of the trajectory, for the report.

    Attributes:
        last_event: What it did last.
        stalls: What the watchdog reported.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.last_event = "about to begin"
        self.stalls: list[str] = []
        self._watchdog: Watchdog | None = None
        self._since = math.inf
        self._reported = False

    def beat(self, event: str) -> None:
        """Notes that something happened; `event` says what begins now."""
        self.last_event = event
        if self._watchdog is not None:
            self._since = self._watchdog.clock.now()
            if self._reported:
                self._reported = False
                self._watchdog.wake()

    @property
    def due(self) -> float:
        """When it has stood still for long enough since its last beat, but for the limit."""
        return math.inf if self._reported else self._since

    def begin(self, watchdog: "Watchdog") -> None:
        """Is watched from now on."""
        self._watchdog = watchdog
        self._since = watchdog.clock.now()

    def report(self, still_s: float) -> str:
        """Notes a stall; what it is."""
        self._reported = True
        self.stalls.append(f"{self.name}: nothing for {still_s:g} s since it was {self.last_event}")
        return self.stalls[-1]


class Watchdog:
    """Watches the trajectories of a run.

    Args:
        limit_s: Seconds above 0 without a beat that count as a stall. None: nothing is watched.
        clock: Replaced in tests.
    """

    def __init__(self, limit_s: float | None, *, clock: Clock | None = None) -> None:
        self._limit_s = limit_s
        self.clock = clock if clock is not None else LoopClock()
        self._pulses: set[Pulse] = set()
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._logged_since = -math.inf
        self._num_logged = 0

    async def __aenter__(self) -> Self:
        if self._limit_s is not None:
            self._task = asyncio.create_task(self._look(self._limit_s), name="watchdog")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    @contextmanager
    def watch(self, name: str) -> Iterator[Pulse]:
        """Gives the pulse of a trajectory that is under way inside."""
        pulse = Pulse(name)
        if self._limit_s is None:
            yield pulse
            return
        pulse.begin(self)
        self._pulses.add(pulse)
        self.wake()
        try:
            yield pulse
        finally:
            self._pulses.discard(pulse)

    def wake(self) -> None:
        """Says that there is something new to wait for."""
        self._woken.set()

    def _log(self, text: str, now: float, limit_s: float) -> None:
        """Names the first few within `limit_s`."""
        if now - self._logged_since >= limit_s:
            self._logged_since, self._num_logged = now, 0
        self._num_logged += 1
        if self._num_logged <= _MAX_LOGGED:
            _logger.warning("stuck: %s", text)
        elif self._num_logged == _MAX_LOGGED + 1:
            _logger.warning(
                "more trajectories are stuck; the next %g s they are counted, not named", limit_s
            )

    async def _look(self, limit_s: float) -> None:
        while True:
            self._woken.clear()
            now = self.clock.now()
            for pulse in self._pulses:
                if now - pulse.due >= limit_s:
                    self._log(pulse.report(now - pulse.due), now, limit_s)
            due = min((pulse.due for pulse in self._pulses), default=math.inf) + limit_s
            if due < math.inf:
                await self.clock.sleep(due - now)
            else:
                await self._woken.wait()
