"""Plans a batch whose prefixes are shared: the rank and the micro-batch of each sequence.

Invariant: a plan is a pure function of the sequences, so all ranks make the same one without
communication. Sequences stay in the order of their ids and are only cut, so that neighbours, which
share most, are computed together; a cut inside a common prefix computes it on both sides, and the
row counts that the cuts balance include that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from treadle.policy.client.batch import input_length

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from treadle.agent_loop import Image
    from treadle.policy.client.types import SharePrefixes, TrainSequence

    Ids = Sequence[int] | NDArray[np.int64]

MIN_SAVED_SHARE: Final = 0.1
"""Share of the tokens: where less is saved, `policy.share_prefixes=auto` packs sequences flat."""
MIN_SAVED_ROWS: Final = 16
"""A common run that saves fewer rows is computed again for each sequence: a node costs two calls of
attention per layer, in which even a model of 1 M parameters computes about this many rows."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """Sequences in the order of their ids, with what each shares with the one before it."""

    indices: tuple[int, ...]
    lengths: tuple[int, ...]
    overlaps: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows of one micro-batch of all of them."""
        return sum(self.lengths) - sum(self.overlaps)

    @property
    def saved_share(self) -> float:
        """Share of the tokens that share a row with others."""
        return sum(self.overlaps) / max(1, sum(self.lengths))

    def part(self, first: int, last: int) -> Ordered:
        """Returns the sequences of some places; the first of them shares with none before it."""
        return Ordered(
            self.indices[first:last],
            self.lengths[first:last],
            (0, *self.overlaps[first + 1 : last]),
        )

    def cut(self, max_rows: int) -> list[Ordered]:
        """Cuts into the fewest parts of at most `max_rows`; a longer sequence is its own part."""
        parts: list[Ordered] = []
        first = rows = 0
        for place, (length, overlap) in enumerate(zip(self.lengths, self.overlaps, strict=True)):
            rows += length - overlap
            if place > first and rows > max_rows:
                parts.append(self.part(first, place))
                first, rows = place, length
        return [*parts, self.part(first, len(self.lengths))] if self.lengths else []

    def balanced(self, at_most: int, max_rows: int | None = None) -> list[Ordered]:
        """Cuts into `at_most` parts or fewer, the largest of which has the fewest rows possible.

        With `max_rows`, for which `at_most` parts must suffice, a longer sequence is its own part.
        """
        high = self.num_rows if max_rows is None else min(max_rows, self.num_rows)
        low = min(max(self.lengths, default=0), high)
        while low < high:
            middle = (low + high) // 2
            if len(self.cut(middle)) <= at_most:
                high = middle
            else:
                low = middle + 1
        return self.cut(high)


def mode_on(mode: SharePrefixes, *, cpu: bool) -> SharePrefixes:
    """Returns the mode on a kind of device: auto shares on CPUs only."""
    return mode if cpu or mode == "always" else "never"


def shared(
    sequences: Sequence[TrainSequence], computed: Sequence[int], mode: SharePrefixes
) -> Ordered | None:
    """Returns some of the sequences in the order of their ids; None if they are to be packed flat.

    Only ids that go through the model count: those before a sequence's last loss token.

    Args:
        computed: Indices of those that go through the model.
        mode: `policy.share_prefixes`. auto: only where it saves `MIN_SAVED_SHARE` of the tokens;
            the caller has found that it may help on this device (`mode_on`).
    """
    if mode == "never":
        return None
    paths = _paths([sequences[i] for i in computed])
    places = in_order(paths)
    overlaps = without_short_runs(overlaps_of([paths[p] for p in places]))
    found = Ordered(
        tuple(computed[p] for p in places),
        tuple(len(paths[p]) for p in places),
        tuple(overlaps),
    )
    return found if mode == "always" or found.saved_share >= MIN_SAVED_SHARE else None


def _paths(sequences: Sequence[TrainSequence]) -> list[NDArray[np.int64]]:
    """Returns the ids that go through the model; those of an image are numbers that only it has.

    Different images have the same placeholder ids, and must not look alike.
    """
    numbers: dict[Image, int] = {}
    paths = []
    for sequence in sequences:
        ids = np.asarray(sequence.ids[: input_length(sequence)]).astype(np.int64)
        for placed in sequence.images:
            if placed.start < len(ids):
                number = -1 - numbers.setdefault(placed.image, len(numbers))
                ids[placed.start : placed.stop] = number
        paths.append(ids)
    return paths


def in_order(paths: Sequence[Ids]) -> list[int]:
    """Returns the indices of id sequences in the order of their ids; equal ones by index."""
    keys = [_sort_key(path) for path in paths]
    return sorted(range(len(paths)), key=lambda i: (keys[i], i))


def _sort_key(path: Ids) -> bytes:
    """Returns bytes that are in the order of the ids, which may be negative: fast to compare."""
    return (np.asarray(path, dtype=np.int64) + 2**62).astype(">u8").tobytes()


def overlaps_of(paths: Sequence[Ids]) -> list[int]:
    """Returns for each sequence how many first ids it has in common with the one before it.

    Args:
        paths: Ids, in the order of `in_order`.
    """
    overlaps, before = [], np.empty(0, dtype=np.int64)
    for path in paths:
        ids = np.asarray(path, dtype=np.int64)
        common = min(len(ids), len(before))
        differ = np.flatnonzero(ids[:common] != before[:common])
        overlaps.append(int(differ[0]) if len(differ) else common)
        before = ids
    return overlaps


def without_short_runs(overlaps: Sequence[int]) -> list[int]:
    """Returns overlaps, each at most as long as given, in which every run saves `MIN_SAVED_ROWS`.

    From the root on, a run that saves fewer rows is no longer shared; its sequences compute it on
    their own, or share it together with what longer run some of them have in common.
    """
    kept = [0] * len(overlaps)
    pending = [(1, len(overlaps), 0)]  # sequences first-1 to last-1 share the first `shared` ids
    while pending:
        first, last, shared = pending.pop()
        if first >= last:
            continue
        common = min(overlaps[first:last])
        if (common - shared) * (last - first) >= MIN_SAVED_ROWS:
            shared = common
        for i in range(first, last):
            if overlaps[i] == common:
                kept[i] = shared
                pending.append((first, i, shared))
                first = i + 1
        pending.append((first, last, shared))
    return kept


def micro_batches(
    batch: Ordered, *, num_shards: int, shard: int, max_tokens: int, at_least: int = 1
) -> list[Ordered]:
    """Returns one shard's micro-batches, of at most `max_tokens` rows; may be empty.

    Args:
        max_tokens: Maximum number of rows in a micro-batch; a longer sequence is its own.
        at_least: Number of micro-batches to make if that makes the largest smaller: a pipeline of n
            stages idles with fewer than n.
    """
    shards = batch.balanced(num_shards)
    if shard >= len(shards):
        return []
    share = shards[shard]
    return share.balanced(max(len(share.cut(max_tokens)), at_least), max_tokens)
