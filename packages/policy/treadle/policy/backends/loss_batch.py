"""The loss tokens of a batch, and the statistics of a step over them, for any backend.

Slots number the loss tokens of the whole batch, in the order of its sequences. `LossBatch` makes
the tensors of each micro-batch's loss tokens.

Shape suffixes: T loss tokens and S samples of a micro-batch, M loss tokens of the batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from treadle.policy.algorithms.mismatch import mismatch_metrics
from treadle.policy.algorithms.value_loss import value_loss
from treadle.policy.backend import LossInputs
from treadle.policy.backends.ranks import to_device
from treadle.policy.client.batch import check_optional_fields, has_gradient, input_length
from treadle.policy.client.sampling_masks import masks_of
from treadle.policy.client.types import LossStats, TokenValues, TrainSequence

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from treadle.agent_loop import FloatArray
    from treadle.policy.backend import LossFn


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchTokens:
    """The loss tokens of a micro-batch."""

    slots_T: Tensor
    """Index of each loss token among the loss tokens of the whole batch."""
    weights_T: Tensor
    advantages_T: Tensor
    rollout_logprobs_T: Tensor | None
    old_logprobs_T: Tensor | None
    ref_logprobs_T: Tensor | None
    stale_T: Tensor
    sample_lengths_S: Tensor
    selected_T: Tensor | None
    sampling_masks: Sequence[bytes]
    """Of the tokens that are computed here; empty: no token has one."""

    @property
    def num_rows(self) -> int:
        """Positions that the model computes."""
        raise NotImplementedError

    def loss_inputs(self, logprobs_T: Tensor, entropy_T: Tensor) -> LossInputs:
        """Returns the input of the loss, given the output of the model."""
        old_T = self.old_logprobs_T
        return LossInputs(
            logprobs_T=logprobs_T,
            entropy_T=entropy_T,
            advantages_T=self.advantages_T,
            old_logprobs_T=logprobs_T.detach() if old_T is None else old_T,
            rollout_logprobs_T=self.rollout_logprobs_T,
            ref_logprobs_T=self.ref_logprobs_T,
            stale_T=self.stale_T,
            sample_lengths_S=self.sample_lengths_S,
            selected_T=self.selected_T,
        )


class LossBatch:
    """The loss tokens of a batch; on the device, as tensors of some of its sequences."""

    def __init__(
        self, sequences: Sequence[TrainSequence], weights: Sequence[float], *, at: torch.device
    ) -> None:
        """Takes the whole batch.

        Args:
            weights: Weight of a loss token per sequence.

        Raises:
            ValueError: Only some of the sequences have one of the optional log-probabilities, or
                `selected`.
        """
        check_optional_fields(sequences)
        self.sequences = sequences
        self._weights = weights
        self._at = at
        self._positions = [sequence.loss_positions for sequence in sequences]
        self._offsets = [0, *accumulate(len(p) for p in self._positions)]

    @property
    def num_loss_tokens(self) -> int:
        """Number of loss tokens of the whole batch, that is of slots."""
        return self._offsets[-1]

    def has(self, name: str) -> bool:
        """Returns whether the batch carries the optional log-probabilities of this name."""
        return bool(self.sequences) and getattr(self.sequences[0], name) is not None

    def at_slots(self, name: str) -> Tensor:
        """Returns [M] numbers of all loss tokens, on the device.

        Raises:
            ValueError: A sequence does not carry them.
        """
        lacking = sum(getattr(sequence, name) is None for sequence in self.sequences)
        if lacking:
            raise ValueError(f"{lacking} of {len(self.sequences)} sequences have no {name}")
        return self._joined([sequence.at_loss_tokens(name) for sequence in self.sequences])

    def slots(self, indices: Sequence[int]) -> Tensor:
        """Returns the slots of some sequences, on the device."""
        runs = [np.arange(self._offsets[i], self._offsets[i + 1]) for i in indices]
        return self._joined(runs, np.int64)

    def loss_tokens(self, indices: Sequence[int]) -> dict[str, Any]:
        """Returns the fields of `MicroBatchTokens` of some sequences.

        Raises:
            RuntimeError: Another data-parallel group has the values of a sequence.
        """
        chosen = [self.sequences[i] for i in indices]
        if any(sequence.is_outline for sequence in chosen):
            raise RuntimeError(f"sequences {list(indices)} have values on other ranks only")
        weights = [np.full(len(self._positions[i]), self._weights[i]) for i in indices]
        counts = [len(self._positions[i]) for i in indices]

        def numbers(name: str) -> Tensor | None:
            if not self.has(name):
                return None
            return self._joined([sequence.at_loss_tokens(name) for sequence in chosen])

        def flags(name: str) -> Tensor:
            parts = [sequence.flags_at_loss_tokens(name) for sequence in chosen]
            return self._joined(parts, np.bool_)

        return {
            "slots_T": self.slots(indices),
            "weights_T": self._joined(weights, np.float32),
            "advantages_T": numbers("advantages"),
            "rollout_logprobs_T": numbers("rollout_logprobs"),
            "old_logprobs_T": numbers("old_logprobs"),
            "ref_logprobs_T": numbers("ref_logprobs"),
            "stale_T": flags("stale"),
            "sample_lengths_S": to_device(np.array(counts, np.int64), self._at),
            "selected_T": flags("selected") if self.has("selected") else None,
            "sampling_masks": masks_of(chosen),
        }

    def unpack(self, values_M: NDArray[np.float32]) -> list[FloatArray]:
        """Returns values by slot as one [L] array per sequence, 0.0 outside the loss mask."""
        ends = zip(self.sequences, *(self._offsets[:-1], self._offsets[1:]), strict=True)
        return [sequence.aligned(values_M[begin:end]) for sequence, begin, end in ends]

    def _joined(self, parts: Sequence[NDArray[Any]], dtype: DTypeLike = np.float32) -> Tensor:
        joined = np.concatenate([np.empty(0, dtype), *parts], dtype=dtype, casting="same_kind")
        return to_device(joined, self._at)


def to_compute(sequences: Sequence[TrainSequence], loss: LossFn | None = None) -> list[int]:
    """Returns which sequences go through the model: those with loss tokens.

    Args:
        loss: Leaves out sequences to which it gives no gradient; None leaves out none.
    """
    needs_gradient = loss is not None and loss.zero_without_advantage
    return [
        index
        for index, sequence in enumerate(sequences)
        if sequence.num_loss_tokens and (has_gradient(sequence) or not needs_gradient)
    ]


class _Sums:
    """Sums over loss tokens of what a step counts; ranks are reduced once, at the end.

    Invariant: a metric is a mean over the loss tokens that went through the model, exact for any
    cut of the batch; if none did, there are no metrics.
    """

    def __init__(
        self, batch: LossBatch, computed: Sequence[int], names: Sequence[str], *, speaks: bool
    ) -> None:
        self._began = time.perf_counter()
        self._batch, self._computed, self._names, self._speaks = batch, computed, names, speaks
        self._slots_M = batch.slots(computed)
        at = self._slots_M.device
        self._rows = 0
        self._sums = torch.zeros(1 + len(names), dtype=torch.float64, device=at)

    def _count(self, micro: MicroBatchTokens, weighted_T: Tensor, *metrics: Tensor) -> None:
        if self._speaks:
            self._rows += micro.num_rows
            values = [weighted_T.detach(), *metrics]
            self._sums += torch.stack([v.sum(dtype=torch.float64) for v in values])

    @torch.no_grad()
    def reduce(self, num_micro_batches: int) -> LossStats:
        """Collective, and waits for the device: the statistics over all ranks."""
        count = torch.tensor(num_micro_batches, device=self._sums.device)
        dist.all_reduce(count, dist.ReduceOp.MAX)
        everything = torch.cat((self._sums, self._sums.new_full((1,), self._rows)))
        dist.all_reduce(everything)
        loss, *sums, rows = everything.tolist()
        tokens, sequences = len(self._slots_M), self._batch.sequences
        names = self._names if tokens else ()
        return LossStats(
            loss=loss,
            num_sequences=len(sequences),
            num_computed=len(self._computed),
            num_tokens=sum(input_length(sequences[i]) for i in self._computed),
            num_rows=int(rows) if tokens else 0,
            num_loss_tokens=self._batch.num_loss_tokens,
            num_micro_batches=int(count) if tokens else 0,
            time_s=time.perf_counter() - self._began,
            metrics={n: total / tokens for n, total in zip(names, sums, strict=False)},
        )


class PolicyLoss(_Sums):
    """The loss of a batch and its statistics.

    The difference to the rollout engine is kept per token, since a percentile cannot be reduced
    from parts.
    """

    def __init__(
        self,
        loss: LossFn,
        batch: LossBatch,
        computed: Sequence[int],
        *,
        keep_tokens: bool,
        speaks: bool = True,
    ) -> None:
        """Begins at nothing.

        Args:
            speaks: Whether this rank's micro-batches count: one of those that compute the same.
        """
        names = ["actor/entropy", *_metric_names(loss)]
        super().__init__(batch, computed, names, speaks=speaks)
        self._loss = loss
        at = self._slots_M.device
        # Of each loss token: the difference to the rollout engine, and 1 if it is stale.
        self._gaps_2M = torch.zeros(2, batch.num_loss_tokens, device=at)
        self._has_rollout = batch.has("rollout_logprobs")
        # Log-probability and entropy of each loss token.
        self._tokens_2M = torch.zeros(2, batch.num_loss_tokens, device=at) if keep_tokens else None

    def __call__(self, micro: MicroBatchTokens, logprobs_T: Tensor, entropy_T: Tensor) -> Tensor:
        """Returns the weighted sum of a micro-batch, and counts it."""
        inputs = micro.loss_inputs(logprobs_T, entropy_T)
        output = self._loss(inputs)
        weighted_T = output.loss_T * micro.weights_T
        with torch.no_grad():
            self._count(micro, weighted_T, entropy_T.detach(), *output.metrics_T.values())
            if self._speaks:
                self._keep(micro, inputs)
        return weighted_T.sum()

    def _keep(self, micro: MicroBatchTokens, inputs: LossInputs) -> None:
        if inputs.rollout_logprobs_T is not None:
            gaps_T = inputs.logprobs_T.detach() - inputs.rollout_logprobs_T
            self._gaps_2M[:, micro.slots_T] = torch.stack([gaps_T, micro.stale_T.to(gaps_T.dtype)])
        if self._tokens_2M is not None:
            self._tokens_2M[:, micro.slots_T] = torch.stack(
                [inputs.logprobs_T.detach().float(), inputs.entropy_T.detach().float()]
            )

    @torch.no_grad()
    def reduce(self, num_micro_batches: int) -> LossStats:
        """See `_Sums.reduce`."""
        stats = super().reduce(num_micro_batches)
        metrics = dict(stats.metrics)
        if self._has_rollout and len(self._slots_M):
            dist.all_reduce(self._gaps_2M)
            gaps_M, stale_M = self._gaps_2M[:, self._slots_M]
            metrics |= mismatch_metrics(gaps_M, stale_M.bool())
        return replace(stats, metrics=metrics, tokens=self._kept())

    def _kept(self) -> TokenValues | None:
        """Collective: the values of each loss token, if they are kept."""
        if self._tokens_2M is None:
            return None
        dist.all_reduce(self._tokens_2M)
        values_2M = torch.full_like(self._tokens_2M, torch.nan)
        values_2M[:, self._slots_M] = self._tokens_2M[:, self._slots_M]
        logprobs_M, entropy_M = values_2M.cpu().numpy()
        return TokenValues(logprobs_M=logprobs_M, entropy_M=entropy_M)


class ValueLoss(_Sums):
    """The value loss of a batch, for a critic, and its statistics."""

    def __init__(
        self,
        batch: LossBatch,
        computed: Sequence[int],
        *,
        clip: float | None,
        speaks: bool = True,
    ) -> None:
        """See `PolicyLoss`.

        Raises:
            ValueError: A sequence has no values or no returns.
        """
        names = ("critic/vf_clipfrac", "critic/vpred_mean")
        super().__init__(batch, computed, names, speaks=speaks)
        self._clip = clip
        self._old_M, self._returns_M = batch.at_slots("values"), batch.at_slots("returns")

    def __call__(self, micro: MicroBatchTokens, values_T: Tensor) -> Tensor:
        """Returns the weighted sum of a micro-batch, and counts it."""
        old_T, returns_T = self._old_M[micro.slots_T], self._returns_M[micro.slots_T]
        loss_T, clipped_T = value_loss(values_T, old_T, returns_T, clip=self._clip)
        weighted_T = loss_T * micro.weights_T
        self._count(micro, weighted_T, clipped_T, values_T.detach())
        return weighted_T.sum()


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
        stale_T=empty.bool(),
        sample_lengths_S=torch.zeros(0, dtype=torch.int64),
        selected_T=empty.bool(),
    )
    return list(loss(nothing).metrics_T)
