"""Attention of the rows that a rank has, over all rows of the micro-batch.

A rank's rows are ranges of the micro-batch, and its pieces of attention are those of
`prefixes/attention.py`: a run that is cut is a run that continues itself. Its own rows in a run
attend to each other causally, without other ranks. What they continue, be it an ancestor or
the beginning of their own run on another rank, they see whole, among the gathered keys and values.

Shape suffixes: P rows of this rank, G rows of the micro-batch, B key and value heads, D head size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.policy.backends.megatron.prefixes.attention import Above, TreeSegments, groups_of
from treadle.policy.backends.megatron.prefixes.tree import RowRun

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class ContextSegments(TreeSegments):
    """The segments that Megatron hands through unread, on one rank of a context group.

    The ranges of `above` count the queries among this rank's rows and the keys among all rows.
    """

    group: ProcessGroup | None = None
    places_G: Tensor | None = None
    """Where each row of the micro-batch is among those of all ranks, rank after rank."""
    rows_G: Tensor | None = None
    """The inverse."""

    @classmethod
    def of_runs(
        cls,
        runs: Sequence[RowRun],
        rows: Sequence[Sequence[range]],
        group: ProcessGroup,
        at: torch.device,
    ) -> ContextSegments:
        """Returns the attention of this rank.

        Args:
            rows: Rows of each rank, from `rows_of_ranks`.
        """
        mine = rows[group.rank()]
        order = torch.tensor(list(chain.from_iterable(chain.from_iterable(rows))), device=at)
        return cls(
            qkv_format="sbhd",
            own=tuple(groups_of(list(own_runs(runs, mine)), at)),
            above=tuple(runs_above(runs, mine)),
            group=group,
            places_G=torch.argsort(order),
            rows_G=order,
        )

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the [G, B, D] keys and values of all ranks."""
        assert self.group is not None and self.places_G is not None
        mine = torch.stack((key, value), 1)
        everyone = mine.new_empty(self.group.size() * len(mine), *mine.shape[1:])
        dist.all_gather_into_tensor(everyone, mine, group=self.group)
        everyone = everyone.index_select(0, self.places_G)
        return everyone[:, 0], everyone[:, 1]

    def reduce(self, grads: Tensor) -> Tensor:
        """Returns [P, 2, B, D], the sums over all ranks of this rank's rows of [G, 2, B, D]."""
        assert self.group is not None and self.rows_G is not None
        everyone = grads.index_select(0, self.rows_G)
        mine = everyone.new_empty(len(everyone) // self.group.size(), *everyone.shape[1:])
        dist.reduce_scatter_tensor(mine, everyone, group=self.group)
        return mine


def own_runs(runs: Sequence[RowRun], mine: Sequence[range]) -> Iterator[RowRun]:
    """Yields the parts of runs that are a rank's, as its own rows count them."""
    first = 0
    for rows in mine:
        for run in runs:
            start, stop = max(run.start, rows.start), min(run.stop, rows.stop)
            if start < stop:
                start, stop = start - rows.start + first, stop - rows.start + first
                yield RowRun(start, stop, stop)
        first += len(rows)


def runs_above(runs: Sequence[RowRun], mine: Sequence[range]) -> Iterator[Above]:
    """Yields what a rank's rows see whole: queries counted among its rows, keys among all.

    A run is cut where a range of the rank begins: from there to the next cut, the rank's rows that
    see the keys whole are the same.
    """
    starts = [rows.start for rows in mine]
    before = [0, *accumulate(len(rows) for rows in mine)]

    def here(row: int) -> int:
        """Returns how many of the rank's rows come before a row."""
        number = bisect_left(starts, row)
        last = number - 1
        return min(before[number], before[last] + row - starts[last]) if number else 0

    for run in runs:
        cuts = [run.start, *(s for s in starts if run.start < s < run.stop), run.stop]
        last = here(run.end)
        for start, stop in pairwise(cuts):
            if (first := here(stop)) < last:
                yield Above(slice(first, last), slice(start, stop))
