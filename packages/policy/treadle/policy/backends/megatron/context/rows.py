"""Which rows of a micro-batch each rank of a context group has.

Invariant: a pure function of the positions, so that all ranks agree without communication. All
ranks have equally many rows, and nearly equal work in attention.

A row at position p of its sequence attends to p + 1 rows. The micro-batch is cut into equal blocks,
which are dealt by their work, the greatest first, forwards and backwards in turn. Of one sequence
with two blocks a rank this gives rank r the blocks r and 2C - 1 - r, the zigzag of ring attention
(arXiv:2311.09431 deals single rows instead); more blocks balance micro-batches of short and long
sequences too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

BLOCKS_PER_RANK: Final = 4
"""A multiple of two, so that a rank's places in the deal are balanced. Each further one costs up to
two attention calls."""


def row_multiple(ranks: int, of_rank: int = 1) -> int:
    """Returns what the rows of a micro-batch must be a multiple of.

    Args:
        of_rank: Number that the rows of each rank must be a multiple of.
    """
    return of_rank if ranks == 1 else ranks * math.lcm(BLOCKS_PER_RANK, of_rank)


def rows_of_ranks(positions: Sequence[int], ranks: int) -> list[list[range]]:
    """Returns the rows of each rank as ascending ranges with gaps between them.

    Args:
        positions: Positions of all rows in their sequences; a multiple of `row_multiple` in number.
    """
    count = ranks * BLOCKS_PER_RANK
    size, rest = divmod(len(positions), count)
    assert not rest, f"{len(positions)} rows do not divide into {count} blocks"
    work = np.asarray(positions, dtype=np.int64).reshape(count, size).sum(1)
    blocks: list[list[int]] = [[] for _ in range(ranks)]
    for place, block in enumerate(sorted(range(count), key=lambda b: (-work[b], -b))):
        turn, rank = divmod(place, ranks)
        blocks[ranks - 1 - rank if turn % 2 else rank].append(block)
    return [_joined(sorted(mine), size) for mine in blocks]


def _joined(blocks: Sequence[int], size: int) -> list[range]:
    """Returns the rows of ascending blocks, neighbours joined."""
    firsts = [0, *(i for i, (a, b) in enumerate(pairwise(blocks), 1) if b > a + 1), len(blocks)]
    return [
        range(blocks[first] * size, (blocks[last - 1] + 1) * size)
        for first, last in pairwise(firsts)
    ]
