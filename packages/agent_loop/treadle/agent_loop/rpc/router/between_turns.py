"""Between turns: for how long a replica had open sessions and no call, so that it waited for tools.

A replica without a call that has open sessions waits for their tools; one without any session waits
for trajectories. Invariant: the seconds of a replica never fall, also after it was removed.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping

from treadle.agent_loop.clock import Clock

__all__ = ["BetweenTurns"]


class BetweenTurns:
    """See the module docstring.

    Args:
        clock: Times the sessions.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._occupied: set[str] = set()
        self._calls: Counter[str] = Counter()
        self._since: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def sessions_changed(self, address: str, *, sessions: int) -> None:
        """Notes how many sessions a replica has now."""
        if sessions:
            self._occupied.add(address)
        else:
            self._occupied.discard(address)
        self._changed(address)

    @contextlib.contextmanager
    def call(self, address: str) -> Iterator[None]:
        """Notes a call to a replica, which lasts as long as the block."""
        self._calls[address] += 1
        self._changed(address)
        try:
            yield
        finally:
            self._calls[address] -= 1
            if not self._calls[address]:
                del self._calls[address]
            self._changed(address)

    def seconds(self) -> Mapping[str, float]:
        """Returns the seconds until now, by address."""
        now = self._clock.now()
        running = {address: now - since for address, since in self._since.items()}
        return {
            address: self._seconds.get(address, 0.0) + running.get(address, 0.0)
            for address in self._seconds.keys() | running.keys()
        }

    def _changed(self, address: str) -> None:
        if address in self._occupied and address not in self._calls:
            self._since.setdefault(address, self._clock.now())
        elif (since := self._since.pop(address, None)) is not None:
            self._seconds[address] = self._seconds.get(address, 0.0) + self._clock.now() - since
