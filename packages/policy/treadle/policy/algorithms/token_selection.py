"""Token selection: which tokens of a mini-batch Clip-Cov and KL-Cov treat apart.

Cov of a token is (A - mean A) (log p - mean log p), with the means over the loss tokens of the
mini-batch and p the policy's at this optimizer step: "The Entropy Mechanism of Reinforcement
Learning for Reasoning Language Models" (arXiv:2505.22617), section 4.2.

Invariant: the selection is made once over the whole mini-batch, before it is cut into
micro-batches, and by the same rule on every rank. It depends neither on micro-batches nor on
parallel sizes, except where rounding makes two covariances change places. verl selects within each
micro-batch of each rank. Time is linear in the tokens, but for the sort of kl_cov.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from treadle.agent_loop import BoolArray
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig

__all__ = ["Selector", "token_selector"]

Selector = Callable[
    [Sequence[TrainSequence], Sequence[Sequence[float]], int], Sequence[TrainSequence]
]
"""Takes a mini-batch, the policy's log-probabilities of it and a seed; sets `selected`."""


def token_selector(config: AlgorithmConfig) -> Selector | None:
    """Returns what selects tokens for the loss of these settings; None: it needs no selection."""
    if config.loss not in ("clip_cov", "kl_cov"):
        return None

    def select(
        sequences: Sequence[TrainSequence], logprobs: Sequence[Sequence[float]], seed: int
    ) -> Sequence[TrainSequence]:
        masks = [torch.from_numpy(np.array(s.loss_mask)) for s in sequences]
        new = _flat(logprobs, masks)
        advantages = _flat([s.advantages for s in sequences], masks)
        covariances = (advantages - advantages.mean()) * (new - new.mean())
        if config.loss == "kl_cov":
            chosen = largest(covariances, config.cov.ratio)
        else:
            given = [
                new_S if s.old_logprobs is None else s.old_logprobs
                for s, new_S in zip(sequences, logprobs, strict=True)
            ]
            old = _flat(given, masks)
            ratio = (new - old).exp()
            up = (advantages > 0) & (ratio > 1.0 + config.clip_high)
            down = (advantages < 0) & (ratio < 1.0 - config.clip_low)
            chosen = some_in_band(
                covariances.where(~(up | down), torch.inf),
                config.cov.ratio,
                low=config.cov.clip_low,
                high=config.cov.clip_high,
                seed=seed,
            )
        flags = torch.zeros(len(new), dtype=torch.bool)
        flags[chosen] = True
        counts = [int(mask.sum()) for mask in masks]
        parts = flags.split(counts)
        return [
            replace(s, selected=_whole(part, mask))
            for s, mask, part in zip(sequences, masks, parts, strict=True)
        ]

    return select


def _flat(values: Sequence[float | Sequence[float]], masks: Sequence[Tensor]) -> Tensor:
    """Returns the values of all loss tokens; a sequence has one number, or one per token."""
    parts = [
        torch.full((int(mask.sum()),), each, dtype=torch.float64)
        if isinstance(each, float)
        else torch.from_numpy(np.array(each, dtype=np.float64))[mask]
        for each, mask in zip(values, masks, strict=True)
    ]
    return torch.cat(parts)


def _whole(flags_T: Tensor, mask: Tensor) -> BoolArray:
    """Returns the flags of all tokens of a sequence from those of its loss tokens."""
    flags = torch.zeros(len(mask), dtype=torch.bool)
    flags[mask] = flags_T
    return BoolArray.of_buffer(flags.numpy().data)


def largest(covariances_T: Tensor, ratio: float) -> Tensor:
    """Returns the indices of the largest; ratio of all, rounded down, and at least one."""
    count = max(1, int(ratio * len(covariances_T)))
    return covariances_T.argsort(descending=True, stable=True)[:count]


def some_in_band(
    covariances_T: Tensor, ratio: float, *, low: float, high: float, seed: int
) -> Tensor:
    """Returns indices drawn from those strictly between `low` and `high`.

    Their number is ratio of all, rounded down and at least one, or all that there are.
    """
    inside = ((covariances_T > low) & (covariances_T < high)).nonzero().flatten()
    count = max(1, int(ratio * len(covariances_T)))
    drawn = torch.randperm(len(inside), generator=torch.Generator().manual_seed(seed))
    return inside[drawn[:count]]
