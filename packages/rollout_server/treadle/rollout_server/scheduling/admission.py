"""Admission: which completions run, which wait, which are rejected.

Invariant: at most `max_in_flight` tickets run and at most `max_queued` wait, and no ticket
waits while a slot is free unless admission is paused. Slots go to the highest priority, then
first come, first served, so equal priorities never starve one another.

Pure: every method takes the time and returns what changed. Tasks wait in `request_queue.py`.
"""

import heapq
import itertools
from dataclasses import dataclass

_MIN_RETRY_S = 0.05
_MAX_RETRY_S = 30.0
_UNKNOWN_SERVICE_S = 1.0  # assumed for a completion before one has ended
_SLACK = 64  # cancelled tickets that the heap may hold on to
_SMOOTHING = 0.1  # weight of the newest completion in the mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Runs now."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """Waits until a call returns its ticket as admitted."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Rejected; the queue is likely to have room in `retry_after_s` seconds."""

    retry_after_s: float


class Admission:
    """See the module docstring.

    Args:
        max_in_flight: Maximum number of running tickets, at least 1.
        max_queued: Maximum number of waiting tickets.
    """

    def __init__(self, *, max_in_flight: int, max_queued: int) -> None:
        self.max_in_flight = max_in_flight
        self.max_queued = max_queued
        self._numbers = itertools.count()
        self._running: dict[int, float] = {}
        self._queue: list[tuple[int, int]] = []
        self._waiting: set[int] = set()
        self._paused = False
        self._service_s: float | None = None

    @property
    def in_flight(self) -> int:
        """Number of tickets that run."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """Number of tickets that wait."""
        return len(self._waiting)

    @property
    def paused(self) -> bool:
        """Whether new tickets wait although slots are free."""
        return self._paused

    def admit(self, priority: int, now: float) -> Admitted | Queued | Rejected:
        """Admits, queues or rejects one completion."""
        if not self._paused and not self._waiting and self.in_flight < self.max_in_flight:
            ticket = next(self._numbers)
            self._running[ticket] = now
            return Admitted(ticket=ticket)
        if self.queued >= self.max_queued:
            return Rejected(retry_after_s=self.retry_after_s())
        ticket = next(self._numbers)
        self._waiting.add(ticket)
        heapq.heappush(self._queue, (-priority, ticket))
        return Queued(ticket=ticket)

    def finish(self, ticket: int, now: float) -> tuple[int, ...]:
        """Ends a running ticket; returns those that run instead."""
        service_s = now - self._running.pop(ticket)
        old = service_s if self._service_s is None else self._service_s
        self._service_s = old + _SMOOTHING * (service_s - old)
        return self._fill(now)

    def cancel(self, ticket: int, now: float) -> tuple[int, ...]:
        """Forgets a queued ticket that is no longer wanted; returns those that run instead.

        It may have been given a slot in the meantime, which goes to the next ticket, or have
        been rejected. The mean time of a completion does not change.
        """
        self._waiting.discard(ticket)
        if len(self._queue) > 2 * len(self._waiting) + _SLACK:
            self._queue = [entry for entry in self._queue if entry[1] in self._waiting]
            heapq.heapify(self._queue)
        if self._running.pop(ticket, None) is None:
            return ()
        return self._fill(now)

    def pause(self) -> None:
        """Keeps slots free: every new ticket waits. Idempotent."""
        self._paused = True

    def resume(self, now: float) -> tuple[int, ...]:
        """Ends `pause`; returns the tickets that run now."""
        self._paused = False
        return self._fill(now)

    def empty_queue(self) -> tuple[int, ...]:
        """Forgets every waiting ticket and returns them, first to run first."""
        tickets = tuple(ticket for _, ticket in sorted(self._queue) if ticket in self._waiting)
        self._waiting.clear()
        self._queue.clear()
        return tickets

    def retry_after_s(self) -> float:
        """When the queue is likely to have room: the mean time between two completions.

        With `max_in_flight` running for `s` seconds each on average, one ends every
        ``s / max_in_flight`` seconds. Calls that are rejected together return together,
        so the wait grows with the queue in front of them.
        """
        service_s = _UNKNOWN_SERVICE_S if self._service_s is None else self._service_s
        estimate = service_s * (self.queued + 1) / self.max_in_flight
        return min(max(estimate, _MIN_RETRY_S), _MAX_RETRY_S)

    def _fill(self, now: float) -> tuple[int, ...]:
        admitted: list[int] = []
        while self._queue and not self._paused and self.in_flight < self.max_in_flight:
            ticket = heapq.heappop(self._queue)[1]
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                self._running[ticket] = now
                admitted.append(ticket)
        return tuple(admitted)
