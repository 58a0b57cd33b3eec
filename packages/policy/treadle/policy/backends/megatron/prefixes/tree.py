"""Sequences as a tree of prefixes, in rows.

Invariant: sequences are in the order of their ids (`client/prefixes.py`), so that each shares with
all before it no more than with its neighbour. Two numbers per sequence then define the tree: its
length, and its overlap, the number of ids that it has in common with the one before it. Its rows
are its ids after the overlap, packed behind those of the one before: a walk through the tree, depth
first. With overlaps of 0 this is the flat layout.

Example: the ids [1, 2, 3] [1, 2, 3, 4] [1, 5, 6] have overlaps 0, 3 and 1, and take 6 rows, not 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowRun:
    """Consecutive rows that the same sequences go through: a node of the tree."""

    start: int
    stop: int
    """Its rows are [start, stop)."""
    end: int
    """[stop, end) are the rows of those that continue it: its descendants."""


def runs_of(lengths: Sequence[int], overlaps: Sequence[int]) -> list[RowRun]:
    """Returns the nodes of the tree, by their first row.

    Args:
        lengths: Lengths of the sequences, in the order of their ids.
        overlaps: Overlap of each with the one before it; 0 for the first.
    """
    done: list[RowRun] = []
    path: list[tuple[int, int, int]] = []  # (first position, first row, rows) from root to leaf
    rows = 0
    for length, overlap in zip(lengths, overlaps, strict=True):
        while path and path[-1][0] + path[-1][2] > overlap:
            position, row, count = path.pop()
            kept = max(0, overlap - position)
            done.append(RowRun(row + kept, row + count, rows))
            if kept:
                path.append((position, row, kept))
        if length > overlap:
            path.append((overlap, rows, length - overlap))
            rows += length - overlap
    done += [RowRun(row, row + count, rows) for _, row, count in path]
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
