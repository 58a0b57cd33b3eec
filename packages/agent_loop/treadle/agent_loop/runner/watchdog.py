"""The watchdog: reports trajectories in which nothing happens, and what they did last.

Invariant: a stall is reported once, when nothing has happened in a trajectory for `limit_s`, and
again only after something has happened. Every trajectory carries its own reports. The log names
only the first few, because one cause may stall a thousand trajectories. The watchdog ends nothing;
deadlines do that. It is idle while there is nothing to watch, and otherwise sleeps until the first
trajectory could be due. A `StandstillWatch` detects a blocked event loop.

    async with Watchdog(limit_s=120.0) as watchdog:
        with watchdog.watch("task train/7, rollout 0") as pulse:
            pulse.beat("waiting for tools: ['search']")
            ...
        pulse.stalls            # what was reported

Loops beat the pulse in `Services`. The watchdog's only task waits for the clock, or for a
trajectory to begin or to continue after a stall.
"""

import asyncio
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from treadle.agent_loop.clock import Clock, LoopClock
from treadle.agent_loop.runner.standstill import StandstillWatch

_log = logging.getLogger(__name__)
_MAX_LOGGED = 5
# While the event loop stands still, this watchdog does too, and so does every trajectory.
_STANDSTILL_S = 10.0


class Pulse:
    """The latest activity of one trajectory.

    Args:
        name: Name of the trajectory, for the reports.

    Attributes:
        last_event: The last thing that the trajectory began.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.last_event = "about to begin"
        self.stalls: list[str] = []
        self._watchdog: Watchdog | None = None
        self._since = math.inf
        self._reported = False

    def beat(self, event: str) -> None:
        """Records activity; `event` names what begins now."""
        self.last_event = event
        if self._watchdog is not None:
            self._since = self._watchdog.clock.now()
            if self._reported:
                self._reported = False
                self._watchdog.wake()

    @property
    def due(self) -> float:
        """Time of the last beat, from which the limit counts; infinite if already reported."""
        return math.inf if self._reported else self._since

    def begin(self, watchdog: "Watchdog") -> None:
        """Starts being watched."""
        self._watchdog = watchdog
        self._since = watchdog.clock.now()

    def report(self, still_s: float) -> str:
        """Records a stall and returns its description."""
        self._reported = True
        self.stalls.append(f"{self.name}: nothing for {still_s:g} s since it was {self.last_event}")
        return self.stalls[-1]


class Watchdog:
    """Watches the trajectories of a run.

    Args:
        limit_s: Seconds without a beat that count as a stall; above 0. None disables it.
    """

    def __init__(self, limit_s: float | None, *, clock: Clock | None = None) -> None:
        self._limit_s = limit_s
        self.clock = clock if clock is not None else LoopClock()
        self._pulses: set[Pulse] = set()
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._standstill: StandstillWatch | None = None
        self._logged_since = -math.inf
        self._num_logged = 0

    async def __aenter__(self) -> Self:
        if self._limit_s is not None:
            self._standstill = StandstillWatch(min(self._limit_s, _STANDSTILL_S))
            self._standstill.start()
            self._task = asyncio.create_task(self._look(self._limit_s), name="watchdog")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._standstill is not None:
            self._standstill.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    @contextmanager
    def watch(self, name: str) -> Iterator[Pulse]:
        """Yields the pulse of a trajectory, and watches it while the block runs."""
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
        """Wakes the watchdog's task, because there is something new to wait for."""
        self._woken.set()

    def _warn(self, text: str, now: float, limit_s: float) -> None:
        """Logs the first few stalls within `limit_s`."""
        if now - self._logged_since >= limit_s:
            self._logged_since, self._num_logged = now, 0
        self._num_logged += 1
        if self._num_logged <= _MAX_LOGGED:
            _log.warning("stuck: %s", text)
        elif self._num_logged == _MAX_LOGGED + 1:
            _log.warning(
                "more trajectories are stuck; for the next %g s they are counted but not named",
                limit_s,
            )

    async def _look(self, limit_s: float) -> None:
        while True:
            self._woken.clear()
            now = self.clock.now()
            for pulse in self._pulses:
                if now - pulse.due >= limit_s:
                    self._warn(pulse.report(now - pulse.due), now, limit_s)
            due = min((pulse.due for pulse in self._pulses), default=math.inf) + limit_s
            if due < math.inf:
                await self.clock.sleep(due - now)
            else:
                await self._woken.wait()
