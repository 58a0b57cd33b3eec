"""The order of the data: the rows of step s as a pure function of seed and step.

Invariant: a run that resumes at step s sees the rows that an uninterrupted one would see, without
stored state. Each epoch is a permutation of all rows without its last `num_rows % batch_size`; so
no step has a row twice, and with shuffling each epoch omits different rows. Of a mix, this holds of
the rows of each source. Which of them a schedule other than sync trains on, or dynamic sampling,
depends on which of their groups end first, or have signal.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from treadle.trainer.data.errors import DataError
from treadle.trainer.data.prompts import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOrder:
    """The batches of a dataset of `num_rows` rows, `batch_size` rows per step.

    Raises:
        DataError: There are fewer rows than a step needs.
    """

    num_rows: int
    batch_size: int
    seed: int
    shuffle: bool = True
    _orders: dict[int, array[int]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"a step needs at least 1 row, got {self.batch_size}")
        if self.num_rows < self.batch_size:
            raise DataError(
                f"a step needs {self.batch_size} rows, but the dataset has {self.num_rows}: lower "
                f"data.prompts_per_step to at most {self.num_rows}, or add rows"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Number of full batches in one pass over the rows."""
        return self.num_rows // self.batch_size

    @property
    def left_out(self) -> int:
        """Number of rows that an epoch omits because they do not fill a batch."""
        return self.num_rows % self.batch_size

    def epoch(self, step: int) -> int:
        """Returns the epoch, from 0, that step `step`, from 1, belongs to."""
        return (step - 1) // self.steps_per_epoch

    def batch(self, step: int) -> tuple[int, ...]:
        """Returns the [batch_size] distinct row indices of a step.

        Raises:
            ValueError: The step is below 1.
        """
        if step < 1:
            raise ValueError(f"steps are counted from 1, got {step}")
        order = self._permutation(self.epoch(step))
        start = (step - 1) % self.steps_per_epoch * self.batch_size
        return tuple(order[start : start + self.batch_size])

    def _permutation(self, epoch: int) -> array[int]:
        if (kept := self._orders.get(epoch)) is not None:
            return kept
        order = array("Q", range(self.num_rows))
        if self.shuffle:
            random.Random(f"treadle data order {self.seed} {epoch}").shuffle(order)
        for old in sorted(self._orders)[:-1]:  # a step may begin groups of the next epoch
            del self._orders[old]
        self._orders[epoch] = order
        return order


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedOrder:
    """The batches of several sources, each with a fixed number of rows in every step.

    Attributes:
        parts: The rows of each source, as indices of the whole dataset, and their order.
    """

    parts: tuple[tuple[array[int], DataOrder], ...]

    @property
    def batch_size(self) -> int:
        """Number of rows per step."""
        return sum(order.batch_size for _, order in self.parts)

    def epoch(self, step: int) -> int:
        """Returns the epoch, from 0, of the source that has been passed the least often."""
        return min(order.epoch(step) for _, order in self.parts)

    def batch(self, step: int) -> tuple[int, ...]:
        """Returns the [batch_size] distinct row indices of a step.

        The sources are spread evenly over the batch, since what is left over at its end may be
        given up.

        Raises:
            ValueError: The step is below 1.
        """
        placed = [
            ((place + 0.5) / order.batch_size, number, rows[i])
            for number, (rows, order) in enumerate(self.parts)
            for place, i in enumerate(order.batch(step))
        ]
        return tuple(row for *_, row in sorted(placed))


def make_order(
    prompts: Sequence[Prompt],
    weights: Mapping[str, float],
    *,
    batch_size: int,
    seed: int,
    shuffle: bool,
) -> DataOrder | MixedOrder:
    """Returns the order of a dataset.

    Args:
        weights: Shares of a step by `data_source`, of any sum; empty: sources do not count.

    Raises:
        DataError: A source has no weight or no row, or there are fewer rows than a step needs.
    """
    if not weights:
        return DataOrder(num_rows=len(prompts), batch_size=batch_size, seed=seed, shuffle=shuffle)
    rows: dict[str, array[int]] = {}
    for index, prompt in enumerate(prompts):
        source = str(prompt.row.columns.get("data_source"))
        rows.setdefault(source, array("Q")).append(index)
    found = f"the training rows have data_source {', '.join(sorted(rows))}"
    for name in sorted(weights.keys() ^ rows.keys()):
        what = "of no training row" if name in weights else "missing"
        raise DataError(f"data.weights.{name} is {what}; {found}: give each of these a weight")
    counts = rows_per_step(weights, batch_size)
    for name, count in counts.items():
        if not 1 <= count <= len(rows[name]):
            raise DataError(
                f"data.weights.{name}={weights[name]:g} gives {count} of the {batch_size} rows of "
                f"a step, and {name} has {len(rows[name])}: change the weight, or "
                "data.prompts_per_step"
            )
    return MixedOrder(
        parts=tuple(
            (
                rows[name],
                DataOrder(num_rows=len(rows[name]), batch_size=count, seed=seed, shuffle=shuffle),
            )
            for name, count in counts.items()
        )
    )


def rows_per_step(weights: Mapping[str, float], batch_size: int) -> Mapping[str, int]:
    """Returns the rows of each source in a step, by the largest remainders; sorted by source."""
    largest = max(weights.values())
    shares = {name: weights[name] / largest for name in sorted(weights)}
    exact = {name: batch_size * share / sum(shares.values()) for name, share in shares.items()}
    counts = {name: int(share) for name, share in exact.items()}
    left = batch_size - sum(counts.values())
    by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[:left]:
        counts[name] += 1
    return counts
