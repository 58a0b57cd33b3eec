"""A bounded queue of messages from one thread to one gRPC stream.

Invariant: at most `capacity` messages wait. `put` waits for room and the stream waits for a
message. `close` from either side wakes the other; messages put after it are dropped.
"""

import threading
from collections import deque
from typing import Generic, Self, TypeVar

__all__ = ["ChunkQueue"]

T = TypeVar("T")


class ChunkQueue(Generic[T]):
    """Filled by the thread that makes the messages, iterated by the stream."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._finished = False
        self._closed = False

    def put(self, item: T) -> bool:
        """Adds a message, once there is room; returns False if the stream no longer reads."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._capacity)
            if self._closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def finish(self) -> None:
        """Marks the end: the messages in the queue are still read."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def close(self) -> None:
        """Drops all messages; `put` and the stream return at once from now on."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def __iter__(self) -> Self:
        """Returns itself: the stream's side."""
        return self

    def __next__(self) -> T:
        """Waits for a message; stops after `finish` or `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._finished or self._closed)
            if not self._items:
                raise StopIteration
            item = self._items.popleft()
            self._changed.notify_all()
            return item
