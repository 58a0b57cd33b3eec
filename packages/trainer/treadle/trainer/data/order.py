"""The order of the data: the rows of step s as a pure function of seed and step.

Invariant: a run that resumes at step s sees the rows that an uninterrupted one would see, without
stored state. Each epoch is a permutation of all rows without its last `num_rows % batch_size`; so
no step has a row twice, and with shuffling each epoch omits different rows.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from functools import lru_cache

from treadle.trainer.data.errors import DataError


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
        order = _permutation(self.num_rows, self.seed, self.epoch(step), self.shuffle)
        start = (step - 1) % self.steps_per_epoch * self.batch_size
        return tuple(order[start : start + self.batch_size])


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int, shuffle: bool) -> array[int]:
    order = array("Q", range(num_rows))
    if shuffle:
        random.Random(f"treadle data order {seed} {epoch}").shuffle(order)
    return order
