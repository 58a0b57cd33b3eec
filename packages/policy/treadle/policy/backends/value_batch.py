"""The value loss of a batch and its statistics, for a critic of any backend.

Shape suffixes: T loss tokens of a micro-batch, M loss tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from treadle.policy.algorithms.value_loss import value_loss
from treadle.policy.client.batch import input_length
from treadle.policy.client.types import LossStats

if TYPE_CHECKING:
    from treadle.policy.backends.loss_batch import MicroBatchTokens
    from treadle.policy.client.types import TrainSequence

_METRICS: Final = ("critic/vf_clipfrac", "critic/vpred_mean")


class ValueLoss:
    """Sums each micro-batch's statistics over loss tokens; ranks are reduced once, at the end."""

    def __init__(
        self, sequences: Sequence[TrainSequence], *, clip: float | None, at: torch.device
    ) -> None:
        """Takes the whole batch.

        Raises:
            ValueError: A sequence has no values or no returns.
        """
        self.computed = [i for i, s in enumerate(sequences) if s.num_loss_tokens]
        self._sequences, self._clip = sequences, clip
        self._old_M = _at_slots(sequences, "values").to(at)
        self._returns_M = _at_slots(sequences, "returns").to(at)
        self._sums = torch.zeros(2 + len(_METRICS), dtype=torch.float64, device=at)

    def __call__(
        self, micro: MicroBatchTokens, num_rows: int, values_T: Tensor, *, speaks: bool = True
    ) -> Tensor:
        """Returns the weighted sum of a micro-batch.

        Args:
            speaks: Whether this rank's micro-batches count: one of those that compute the same.
        """
        old_T, returns_T = self._old_M[micro.slots_T], self._returns_M[micro.slots_T]
        loss_T, clipped_T = value_loss(values_T, old_T, returns_T, clip=self._clip)
        weighted_T = loss_T * micro.weights_T
        if speaks:
            rows = torch.tensor(num_rows, device=self._sums.device)
            parts = (rows, weighted_T.detach(), clipped_T, values_T.detach())
            self._sums += torch.stack([part.sum(dtype=torch.float64) for part in parts])
        return weighted_T.sum()

    def reduce(self, num_micro_batches: int) -> LossStats:
        """Collective: the sums over all ranks."""
        count = torch.tensor(num_micro_batches, device=self._sums.device)
        dist.all_reduce(count, dist.ReduceOp.MAX)
        dist.all_reduce(self._sums)
        rows, loss, *totals = self._sums.tolist()
        tokens = len(self._old_M)
        return LossStats(
            loss=loss,
            num_sequences=len(self._sequences),
            num_computed=len(self.computed),
            num_tokens=sum(input_length(self._sequences[i]) for i in self.computed),
            num_rows=int(rows),
            num_loss_tokens=tokens,
            num_micro_batches=int(count),
            time_s=0.0,
            metrics={n: total / tokens for n, total in zip(_METRICS, totals, strict=True)},
        )


def _at_slots(sequences: Sequence[TrainSequence], name: str) -> Tensor:
    """Returns [M] numbers of all loss tokens, in the order of the batch's slots.

    Raises:
        ValueError: A sequence does not carry them.
    """
    carried = [getattr(sequence, name) for sequence in sequences]
    if (lacking := sum(numbers is None for numbers in carried)) > 0:
        raise ValueError(f"{lacking} of {len(sequences)} sequences have no {name}")
    numbers = np.concatenate([sequence.at_loss_tokens(name) for sequence in sequences])
    return torch.from_numpy(numbers)
