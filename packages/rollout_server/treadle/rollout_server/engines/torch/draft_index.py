"""The texts that an engine has read and sampled lately, and where their n-grams occur.

Invariant: memory is fixed by the capacity. Positions are in a table that maps the hash of an
n-gram to one place, the newest; another n-gram with the same slot overwrites it. A place is
compared with the n-gram before it is returned, so a hash is never trusted. Texts beyond the
capacity are dropped, the oldest first.

An n-gram is entered once the id after it is known, so a place always has a continuation.

Nothing here waits or uses torch. Not thread-safe; the compute thread owns it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from zlib import crc32

ORDERS = (24, 8, 3)
"""Lengths of n-grams, in ids, longest first."""

_SLOTS_PER_TOKEN = 4  # At least one for each order: a full table overwrites more than it holds.
_PLACE_BITS = 32


class DraftText:
    """Ids of one sequence that an index holds.

    Attributes:
        number: Its place in the order of texts.
        ids: Ids from the first on.
    """

    __slots__ = ("ids", "number")

    def __init__(self, number: int, ids: Iterable[int]) -> None:
        self.number = number
        self.ids = array("i", ids)


class DraftIndex:
    """See the module docstring.

    Args:
        capacity: Maximum number of ids of all texts; a longer text is not held.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        size = 1 << (capacity * _SLOTS_PER_TOKEN - 1).bit_length()
        self._mask = size - 1
        self._slots = array("q", bytes(8 * size))
        self._texts: OrderedDict[int, DraftText] = OrderedDict()
        self._num_texts = 0
        self.num_ids = 0

    def open(self, ids: Sequence[int], first: int) -> DraftText:
        """Adds a text.

        Args:
            first: Index of the first id whose n-grams are entered; others have those before it.
        """
        self._num_texts += 1  # From 1: an empty slot is 0.
        text = DraftText(self._num_texts, ids[:first])
        self._texts[text.number] = text
        self.num_ids += first
        self.extend(text, ids[first:])
        return text

    def extend(self, text: DraftText, new_ids: Iterable[int]) -> None:
        """Appends ids to a text, and enters the n-grams before each."""
        ids, slots, mask = text.ids, self._slots, self._mask
        base = text.number << _PLACE_BITS
        before = place = len(ids)
        for token_id in new_ids:
            for order in ORDERS:
                if order <= place:
                    slots[crc32(ids[place - order : place]) & mask] = base | place
            ids.append(token_id)
            place += 1
        if text.number in self._texts:
            self.num_ids += place - before
            self._evict()

    def find(self, text: DraftText) -> tuple[int, DraftText, int] | None:
        """Finds the longest n-gram at the end of a text that occurred before.

        Returns:
            Its order as an index of `ORDERS`, and the text and place of the id that followed it;
            None: it has none.
        """
        ids = text.ids
        length = len(ids)
        for index, order in enumerate(ORDERS):
            if order > length:
                continue
            ngram = ids[length - order :]
            value = self._slots[self.slot(ngram)]
            held = self._texts.get(value >> _PLACE_BITS)
            if held is None:
                continue
            place = value & ((1 << _PLACE_BITS) - 1)
            if held.ids[place - order : place] == ngram:
                return index, held, place
        return None

    def slot(self, ngram: "array[int]") -> int:
        """Returns where the table has the place of an n-gram."""
        return crc32(ngram) & self._mask

    def _evict(self) -> None:
        while self.num_ids > self._capacity:
            _, text = self._texts.popitem(last=False)
            self.num_ids -= len(text.ids)
