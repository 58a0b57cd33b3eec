"""Occupancy: for how long each replica has had open sessions.

A replica with open sessions and no call waits for tools; one without sessions waits for
trajectories. A call belongs to a session, so the time spent waiting for tools is the occupied time
minus the time in which the replica had sequences, which the replica reports.

Invariant: the seconds of a replica never fall, also after it was removed.
"""

from collections.abc import Mapping

from treadle.agent_loop.clock import Clock

__all__ = ["Occupancy"]


class Occupancy:
    """See the module docstring."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def sessions_changed(self, address: str, *, sessions: int) -> None:
        """Notes how many sessions a replica has now."""
        if sessions:
            self._since.setdefault(address, self._clock.now())
        elif (since := self._since.pop(address, None)) is not None:
            self._seconds[address] = self._seconds.get(address, 0.0) + self._clock.now() - since

    def seconds(self) -> Mapping[str, float]:
        """Returns the seconds until now, by address."""
        now = self._clock.now()
        running = {address: now - since for address, since in self._since.items()}
        return {
            address: self._seconds.get(address, 0.0) + running.get(address, 0.0)
            for address in self._seconds.keys() | running.keys()
        }
