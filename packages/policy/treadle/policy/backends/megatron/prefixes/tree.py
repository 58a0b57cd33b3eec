"""Sequences as a tree of prefixes, in rows.

Invariant: sequences are in the order of their ids, so that each shares with all before it no more
than with its neighbour. Two numbers per sequence then say everything: its length, and its overlap,
the number of ids that it has in common with the one before it. Its rows are its ids after the
overlap, packed behind those of the one before: a walk through the tree, depth first. With overlaps
of 0 this is the flat layout.

Example: the ids [1, 2, 3] [1, 2, 3, 4] [1, 5, 6] have overlaps 0, 3 and 1, and take 6 rows, not 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

MIN_SAVED_ROWS: Final = 16
"""A common run that saves fewer rows is computed again for each sequence: a node costs two calls of
attention per layer, in which even a model of 1 M parameters computes about this many rows."""


Ids = Sequence[int] | NDArray[np.int64]


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


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows that the same sequences go through: a node of the tree."""

    start: int
    stop: int
    """Its rows are [start, stop)."""
    end: int
    """[stop, end) are the rows of those that continue it: its descendants."""


def runs_of(lengths: Sequence[int], overlaps: Sequence[int]) -> list[Run]:
    """Returns the nodes of the tree, by their first row.

    Args:
        lengths: Of the sequences, in the order of their ids.
        overlaps: Of each with the one before it; 0 for the first.
    """
    done: list[Run] = []
    path: list[tuple[int, int, int]] = []  # (first position, first row, rows) from root to leaf
    rows = 0
    for length, overlap in zip(lengths, overlaps, strict=True):
        while path and path[-1][0] + path[-1][2] > overlap:
            position, row, count = path.pop()
            kept = max(0, overlap - position)
            done.append(Run(row + kept, row + count, rows))
            if kept:
                path.append((position, row, kept))
        if length > overlap:
            path.append((overlap, rows, length - overlap))
            rows += length - overlap
    done += [Run(row, row + count, rows) for _, row, count in path]
    return sorted(done, key=lambda run: run.start)


def rows_of_paths(lengths: Sequence[int], overlaps: Sequence[int]) -> list[list[int]]:
    """Returns for each sequence the row of each of its ids."""
    result: list[list[int]] = []
    rows = 0
    for length, overlap in zip(lengths, overlaps, strict=True):
        inherited = result[-1][:overlap] if overlap else []
        own = length - overlap
        result.append([*inherited, *range(rows, rows + own)])
        rows += own
    return result
