"""The slots: who still reads which slot of a segment.

Invariant: a slot is filled only when every reader that it was handed to has given it back or left.
The rank waits in `take`; the threads that hear from the readers wake it with `give_back` and
`leave`. A reader that says nothing is ended by its stream's deadline, which lets it leave.
"""

import threading
from collections.abc import Iterable

__all__ = ["Slots"]


class Slots:
    """Numbered from 0; each is free at first."""

    def __init__(self, num_slots: int, readers: Iterable[str]) -> None:
        self._reading: list[set[str]] = [set() for _ in range(num_slots)]
        self._readers = set(readers)
        self._changed = threading.Condition()

    @property
    def readers(self) -> frozenset[str]:
        """Those that have not left."""
        with self._changed:
            return frozenset(self._readers)

    def take(self, slot: int) -> None:
        """Waits until nobody reads the slot."""
        with self._changed:
            self._changed.wait_for(lambda: not self._reading[slot])

    def hand_out(self, slot: int) -> None:
        """Everyone who has not left reads the slot from now on."""
        with self._changed:
            self._reading[slot] = set(self._readers)

    def give_back(self, reader: str, slot: int) -> None:
        """A reader needs a slot no more.

        Raises:
            ValueError: it was not reading it.
        """
        with self._changed:
            if not 0 <= slot < len(self._reading) or reader not in self._reading[slot]:
                raise ValueError(f"{reader} gave back slot {slot}, which it had not been handed")
            self._reading[slot].remove(reader)
            self._changed.notify_all()

    def leave(self, reader: str) -> None:
        """A reader reads nothing any more. Idempotent."""
        with self._changed:
            self._readers.discard(reader)
            for reading in self._reading:
                reading.discard(reader)
            self._changed.notify_all()
