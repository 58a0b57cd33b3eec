"""The statistics of a step: sums over loss tokens, reduced over ranks once at the end.

Invariant: a metric is a mean over the loss tokens that went through the model, exact for any cut of
the batch; if none did, there are no metrics. The difference to the rollout engine is kept per
token, since a percentile cannot be reduced from parts.

Shape suffixes: T loss tokens of a micro-batch, M loss tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from treadle.trainer.algorithms.mismatch import mismatch_metrics
from treadle.trainer.policy.backend import LossInputs

if TYPE_CHECKING:
    from treadle.trainer.policy.backend import LossFn, LossOutput
    from treadle.trainer.policy.megatron.packing import MicroBatch, Packer
    from treadle.trainer.policy.megatron.parallel import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """A step's statistics, the same on every rank."""

    loss: float
    num_micro_batches: int
    metrics: Mapping[str, float]


class StatsCollector:
    """Takes each micro-batch's outcome on the ranks that compute the loss."""

    def __init__(self, loss: LossFn, packer: Packer, computed: Sequence[int], world: World) -> None:
        """Args are those of the step; `computed` are the sequences that go through the model."""
        self._world = world
        self._names = ["actor/entropy", *_metric_names(loss)]
        self._slots_M = packer.slots(computed)
        self._stale_M = packer.stale(computed)
        at = self._slots_M.device
        self._sums = torch.zeros(1 + len(self._names), dtype=torch.float64, device=at)
        self._gaps_M = torch.zeros(packer.num_loss_tokens, device=at)
        self._has_rollout = packer.has("rollout_logprobs")

    @torch.no_grad()
    def add(self, micro: MicroBatch, inputs: LossInputs, output: LossOutput) -> None:
        """Count one micro-batch."""
        if not self._world.speaks:
            return
        weighted_T = output.loss_T.detach() * micro.weights_T
        values = [weighted_T, inputs.entropy_T.detach(), *output.metrics_T.values()]
        self._sums += torch.stack([v.sum(dtype=torch.float64) for v in values])
        if inputs.rollout_logprobs_T is not None:
            gaps_T = inputs.logprobs_T.detach() - inputs.rollout_logprobs_T
            self._gaps_M[micro.slots_T] = gaps_T

    @torch.no_grad()
    def reduce(self, micro_batches: Sequence[object]) -> Collected:
        """Collective: the sums over all ranks."""
        count = torch.tensor(len(micro_batches), device=self._sums.device)
        dist.all_reduce(count, dist.ReduceOp.MAX)
        dist.all_reduce(self._sums)
        loss, *sums = self._sums.tolist()
        tokens = len(self._slots_M)
        if not tokens:
            return Collected(loss=loss, num_micro_batches=0, metrics={})
        metrics = {name: total / tokens for name, total in zip(self._names, sums, strict=True)}
        if self._has_rollout:
            dist.all_reduce(self._gaps_M)
            metrics |= mismatch_metrics(self._gaps_M[self._slots_M], self._stale_M)
        return Collected(loss=loss, num_micro_batches=int(count), metrics=metrics)


def _metric_names(loss: LossFn) -> list[str]:
    """Asked of the loss itself, as a rank may have no micro-batch to see them in."""
    empty = torch.zeros(0)
    nothing = LossInputs(
        logprobs_T=empty,
        entropy_T=empty,
        advantages_T=empty,
        old_logprobs_T=empty,
        rollout_logprobs_T=empty,
        ref_logprobs_T=empty,
    )
    return list(loss(nothing).metrics_T)
