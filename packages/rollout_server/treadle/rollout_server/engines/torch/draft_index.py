"""The texts that an engine has read and sampled lately, and what followed their n-grams.

Invariant: memory is fixed by the capacity. A table maps the hash of an n-gram to one place, and to
how often in a row the id there followed it again; another id, or another n-gram with the same slot,
takes the slot over. A place is compared with the n-gram before its id is returned, so a hash is
never trusted. Texts beyond the capacity are dropped, the one that grew longest ago first, and their
places with them. A text that was dropped goes on as the context of its own sequence only.

An n-gram is entered once the id after it is known.

Nothing here waits or uses torch. Not thread-safe; the compute thread owns it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from zlib import crc32

ORDERS = (24, 8, 3, 1)
"""Lengths of n-grams, in ids, longest first."""

MOST_AGREEMENT = 255
"""Largest number of repetitions that is counted."""

_SLOTS_PER_TOKEN = 4  # At least one for each order: a full table overwrites more than it holds.
_PLACE_BITS = 32
_PLACES = (1 << _PLACE_BITS) - 1


class Prediction(NamedTuple):
    """What followed an n-gram.

    Attributes:
        order: Index of its length in `ORDERS`.
        token_id: The id that followed it, the last time that this was another one.
        agreement: How often in a row that id followed it again.
    """

    order: int
    token_id: int
    agreement: int


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
        self._agreement = bytearray(size)
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

    def extend(self, text: DraftText, new_ids: Sequence[int]) -> None:
        """Appends ids to a text, and enters the n-grams before each if the text is held."""
        if text.number not in self._texts:
            text.ids.extend(new_ids)
            return
        if len(text.ids) + len(new_ids) > self._capacity:
            self._drop(text.number)
            text.ids.extend(new_ids)
            return
        self._texts.move_to_end(text.number)
        self.num_ids += len(new_ids)
        while self.num_ids > self._capacity:
            self._drop(next(iter(self._texts)))
        ids, mask = text.ids, self._mask
        for place, token_id in enumerate(new_ids, start=len(ids)):
            ids.append(token_id)
            for order in ORDERS:
                if order <= place:
                    slot = crc32(ids[place - order : place]) & mask
                    self._enter(slot, text.number << _PLACE_BITS | place, token_id)

    def predictions(self, ids: "array[int]") -> Iterator[Prediction]:
        """Yields what followed the n-grams at the end of some ids, for the longest one first."""
        length = len(ids)
        for index, order in enumerate(ORDERS):
            if order > length:
                continue
            ngram = ids[length - order :]
            slot = self.slot(ngram)
            value = self._slots[slot]
            held = self._texts.get(value >> _PLACE_BITS)
            if held is None:
                continue
            place = value & _PLACES
            if held.ids[place - order : place] == ngram:
                yield Prediction(index, held.ids[place], self._agreement[slot])

    def _enter(self, slot: int, value: int, token_id: int) -> None:
        before = self._slots[slot]
        held = self._texts.get(before >> _PLACE_BITS)
        if held is not None and held.ids[before & _PLACES] == token_id:
            self._agreement[slot] = min(self._agreement[slot] + 1, MOST_AGREEMENT)
            return
        self._agreement[slot] = 0
        self._slots[slot] = value

    def slot(self, ngram: "array[int]") -> int:
        """Returns where the table has the place of an n-gram."""
        return crc32(ngram) & self._mask

    def _drop(self, number: int) -> None:
        self.num_ids -= len(self._texts.pop(number).ids)
