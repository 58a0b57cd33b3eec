"""The order of the data: which rows step s trains on, as a pure function of seed and step.

Invariant: a run that resumes at step s sees what an uninterrupted one would see, without having
kept anything. Each epoch is a permutation of all rows of which the last `num_rows % batch_size`
are left out; so a step never holds a row twice, and with shuffling each epoch leaves out others.
Nobody waits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from treadle.trainer.data.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOrder:
    """The batches of a dataset of `num_rows`, `batch_size` rows to a step.

    Raises:
        DataError: There are fewer rows than a step needs.
    """

    num_rows: int
    batch_size: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"a step needs at least 1 row, not {self.batch_size}")
        if self.num_rows < self.batch_size:
            raise DataError(
                f"a step needs {self.batch_size} rows, but the dataset has {self.num_rows}: lower "
                f"data.prompts_per_step to at most {self.num_rows}, or add rows"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass over the rows."""
        return self.num_rows // self.batch_size

    @property
    def left_out(self) -> int:
        """Rows that an epoch does not reach, because they do not fill a batch."""
        return self.num_rows % self.batch_size

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that step `step`, from 1, belongs to."""
        return (step - 1) // self.steps_per_epoch

    def batch(self, step: int) -> tuple[int, ...]:
        """The indices of the rows of step `step`, counted from 1: [batch_size], all different."""
        if step < 1:
            raise ValueError(f"steps are counted from 1, not {step}")
        order = _permutation(self.num_rows, self.seed, self.epoch(step), self.shuffle)
        start = (step - 1) % self.steps_per_epoch * self.batch_size
        return order[start : start + self.batch_size]


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int, shuffle: bool) -> tuple[int, ...]:
    order = list(range(num_rows))
    if shuffle:
        random.Random(f"treadle data order {seed} {epoch}").shuffle(order)
    return tuple(order)
