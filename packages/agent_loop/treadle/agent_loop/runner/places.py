"""The places of the tasks that are in flight: a semaphore whose number of places may change.

Invariant: nobody gets a place while as many as the limit are taken. Who has one when the limit
falls keeps it.

Who waits: the one task that acquires, for a release or a higher limit.
"""

import asyncio

__all__ = ["Places"]


class Places:
    """A semaphore whose number of places may change. For one task that acquires.

    Args:
        limit: Number of places.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._changed = asyncio.Event()

    def set_limit(self, limit: int) -> None:
        """Changes the number of places."""
        self._limit = limit
        self._changed.set()

    async def acquire(self) -> None:
        """Takes a place, when one is free."""
        while self._taken >= self._limit:
            self._changed.clear()
            await self._changed.wait()
        self._taken += 1

    def release(self) -> None:
        """Frees a place."""
        self._taken -= 1
        self._changed.set()
