"""The mismatch: the gap between the trainer's probabilities and those used to sample.

Invariant: the gap is measured per sampled token, before the batch has changed the policy. It shows
the difference between two implementations of one model and, for tokens of older weights, also what
training has changed since; the metrics separate the two.

With `top_p`, `top_k` or `min_p` both have the distribution over the ids that were kept when the
token was sampled (`TrainSequence.sampling_masks`), so that truncation adds nothing to a gap.

Shape suffix: M sampled tokens.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["mismatch_metrics"]


def mismatch_metrics(gaps_M: Tensor, stale_M: Tensor | None = None) -> dict[str, float]:
    """Returns the metrics of a batch.

    Args:
        gaps_M: log p_trainer - log p_rollout of each sampled token, nats, not empty.
        stale_M: Which tokens were sampled with older weights (`TrainSequence.stale`). None: none
            were.

    Returns:
        `rollout/logprob_diff_{mean,p99,max}` of the absolute gap, and `rollout/kl`, the k3
        estimate of KL(rollout || trainer) (see `treadle.policy.algorithms.kl`), over all
        tokens; `rollout/stale_tokens`, their share; and where there are some,
        `rollout/logprob_diff_fresh_{mean,p99,max}` over the others.
    """
    metrics = {
        **_sizes("rollout/logprob_diff", gaps_M.abs()),
        # In double precision: the terms are of the size of the gaps squared.
        "rollout/kl": float((gaps_M.double().expm1() - gaps_M.double()).mean()),
        "rollout/stale_tokens": 0.0,
    }
    if stale_M is not None and stale_M.any():
        metrics["rollout/stale_tokens"] = float(stale_M.float().mean())
        if not stale_M.all():
            metrics |= _sizes("rollout/logprob_diff_fresh", gaps_M[~stale_M].abs())
    return metrics


def _sizes(name: str, absolute_M: Tensor) -> dict[str, float]:
    nearest = min(len(absolute_M), -(-99 * len(absolute_M) // 100))  # nearest-rank percentile
    return {
        f"{name}_mean": float(absolute_M.mean()),
        f"{name}_p99": float(absolute_M.kthvalue(nearest).values),
        f"{name}_max": float(absolute_M.max()),
    }
