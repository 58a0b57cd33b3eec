"""The slots of the tasks that are in flight: a semaphore whose number of slots may change.

Invariant: a slot is taken only while fewer than the limit are. When the limit falls, those that are
taken stay taken.

Who waits: the one task that acquires, for a release or a higher limit.
"""

import asyncio

__all__ = ["TaskSlots"]


class TaskSlots:
    """A semaphore whose number of slots may change. For one task that acquires."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._changed = asyncio.Event()

    def set_limit(self, limit: int) -> None:
        """Changes the number of slots."""
        self._limit = limit
        self._changed.set()

    async def acquire(self) -> None:
        """Takes a slot once one is free."""
        while self._taken >= self._limit:
            self._changed.clear()
            await self._changed.wait()
        self._taken += 1

    def release(self) -> None:
        """Frees a slot."""
        self._taken -= 1
        self._changed.set()
