"""The prefix cache: an index of the token prefixes whose keys and values are computed.

Invariant: `longest` returns the longest prefix shared with *any* entry, exact to the token.
There are no blocks and no hashes: ids are encoded big-endian, so byte order is id order, and in
a sorted list the best match of a key is one of the two neighbours of its insertion point.

There are two kinds of entries. A *live* entry points to a running sequence, whose prompt others
may copy while it runs. A *retained* entry owns a copy of the cache of a sequence that ended;
these are bounded in bytes, and the least recently used is evicted first. An entry that is a
prefix of a longer one is dropped. All entries are dropped when the weights change.

In place of the placeholder ids of an image, which are the same for all images, a key has the
serial number of the image: prompts match only as far as their images do.

Nothing here waits or uses torch: the holder of an entry is opaque.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

_ID_BYTES = 4

FIRST_IMAGE_KEY = 1 << 31
"""Key of image 0, once per placeholder; all token ids are below it."""

T = TypeVar("T")


def prefix_key(ids: Sequence[int]) -> bytes:
    """Encodes ids with four bytes each, such that byte order is id order."""
    return np.asarray(ids, dtype=">u4").tobytes()


def common_tokens(left: bytes, right: bytes) -> int:
    """Returns the number of leading ids that two keys share."""
    length = min(len(left), len(right)) // _ID_BYTES
    differs = np.frombuffer(left, np.uint32, length) != np.frombuffer(right, np.uint32, length)
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


@dataclass(slots=True)
class _Entry(Generic[T]):
    holder: T
    retained_bytes: int  # 0 marks a live entry.


class PrefixCache(Generic[T]):
    """Sorted keys, the holder of each, and the number of retained bytes.

    Args:
        capacity_bytes: Maximum bytes of retained entries. 0 retains nothing; live entries
            still work.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.retained_bytes = 0
        self._keys: list[bytes] = []
        self._entries: dict[bytes, _Entry[T]] = {}  # Least recently used first.

    def __len__(self) -> int:
        return len(self._keys)

    def longest(self, key: bytes) -> tuple[int, T | None]:
        """Finds the entry that shares the longest prefix with `key`.

        Returns:
            The number of shared ids and the holder; ``(0, None)`` if nothing matches.
        """
        place = bisect_left(self._keys, key)
        best, best_key = 0, b""
        for neighbour in self._keys[max(place - 1, 0) : place + 1]:
            shared = common_tokens(key, neighbour)
            if shared > best:
                best, best_key = shared, neighbour
        if not best:
            return 0, None
        entry = self._entries.pop(best_key)
        self._entries[best_key] = entry
        return best, entry.holder

    def add_live(self, key: bytes, holder: T) -> None:
        """Adds a running sequence, unless another one has the same key."""
        entry = self._entries.get(key)
        if entry is not None and entry.retained_bytes:
            self._remove(key)  # It could be evicted while the sequence runs.
        if key not in self._entries:
            self._insert(key, _Entry(holder, 0))

    def remove_live(self, key: bytes, holder: T) -> None:
        """Removes the entry that `add_live` added, if any."""
        entry = self._entries.get(key)
        if entry is not None and entry.holder is holder:
            self._remove(key)

    def wants(self, key: bytes, num_bytes: int) -> bool:
        """Returns whether `retain` would keep this: it fits, and no longer entry covers it."""
        place = bisect_left(self._keys, key)
        covered = place < len(self._keys) and self._keys[place].startswith(key)
        return num_bytes <= self.capacity_bytes and not covered

    def retain(self, key: bytes, holder: T, num_bytes: int) -> None:
        """Adds a retained entry that `wants` accepted; drops its prefixes and evicts the oldest."""
        place = bisect_left(self._keys, key)
        while place and key.startswith(self._keys[place - 1]):
            place -= 1
            if not self._entries[self._keys[place]].retained_bytes:
                break
            self._remove(self._keys[place])
        while self.retained_bytes + num_bytes > self.capacity_bytes:
            self._remove(next(k for k, e in self._entries.items() if e.retained_bytes))
        self._insert(key, _Entry(holder, num_bytes))

    def clear(self) -> None:
        """Drops all entries."""
        self._keys.clear()
        self._entries.clear()
        self.retained_bytes = 0

    def _insert(self, key: bytes, entry: _Entry[T]) -> None:
        self._keys.insert(bisect_left(self._keys, key), key)
        self._entries[key] = entry
        self.retained_bytes += entry.retained_bytes

    def _remove(self, key: bytes) -> None:
        del self._keys[bisect_left(self._keys, key)]
        self.retained_bytes -= self._entries.pop(key).retained_bytes
