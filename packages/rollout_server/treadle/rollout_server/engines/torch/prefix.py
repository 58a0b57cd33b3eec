"""The prefix cache: which token prefixes have their keys and values computed somewhere.

Invariant: `longest` returns the longest prefix shared with *any* entry, exactly, token by
token. No blocks, no hashes: ids are written big-endian, so byte order is id order, and in a
sorted list the best match of a key is one of the two neighbours of the place where the key
would stand.

Two kinds of entry share the order. A *live* one points at a running sequence, whose prompt
others may copy while it runs. A *retained* one owns a copy of the cache of a sequence that
ended; these are bounded in bytes and the least recently used goes first. An entry that a
longer one covers is dropped. Everything is dropped when the weights change.

Where an image stands, a key has the image's serial number and not the placeholder id, which
is the same for all images: prompts match as far as their pictures do.

Nothing here waits, and nothing here knows torch: what an entry holds is opaque.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

_ID_BYTES = 4

FIRST_IMAGE_KEY = 1 << 31
"""Stands for image 0 in a key, once for each of its placeholders; token ids are below it."""

T = TypeVar("T")


def prefix_key(ids: Sequence[int]) -> bytes:
    """Encodes ids so that byte order is id order, four bytes each."""
    return np.asarray(ids, dtype=">u4").tobytes()


def common_tokens(left: bytes, right: bytes) -> int:
    """Counts the ids that two keys share at their start."""
    length = min(len(left), len(right)) // _ID_BYTES
    differs = np.frombuffer(left, np.uint32, length) != np.frombuffer(right, np.uint32, length)
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


@dataclass(slots=True)
class _Entry(Generic[T]):
    holder: T
    retained_bytes: int  # 0 marks a live entry, which costs nothing.


class PrefixCache(Generic[T]):
    """Keys in order, what holds each, and the bytes that retained ones cost.

    Args:
        capacity_bytes: Most bytes of retained entries. 0 retains nothing; live entries
            work as ever.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.retained_bytes = 0
        self._keys: list[bytes] = []
        self._entries: dict[bytes, _Entry[T]] = {}  # Oldest use first.

    def __len__(self) -> int:
        return len(self._keys)

    def longest(self, key: bytes) -> tuple[int, T | None]:
        """Finds the entry that shares most ids with the start of `key`.

        Returns:
            How many ids are shared, and what holds them; ``(0, None)`` for no match.
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
        """Adds a running sequence, unless another one holds the same key."""
        entry = self._entries.get(key)
        if entry is not None and entry.retained_bytes:
            self._remove(key)  # It could go while the sequence runs.
        if key not in self._entries:
            self._insert(key, _Entry(holder, 0))

    def remove_live(self, key: bytes, holder: T) -> None:
        """Removes what `add_live` added, if it did."""
        entry = self._entries.get(key)
        if entry is not None and entry.holder is holder:
            self._remove(key)

    def wants(self, key: bytes, num_bytes: int) -> bool:
        """Whether `retain` would keep this: it fits, and no longer entry covers it."""
        place = bisect_left(self._keys, key)
        covered = place < len(self._keys) and self._keys[place].startswith(key)
        return num_bytes <= self.capacity_bytes and not covered

    def retain(self, key: bytes, holder: T, num_bytes: int) -> None:
        """Keeps what `wants` said yes to, and drops what it covers and what is oldest."""
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
        """Drops everything."""
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
