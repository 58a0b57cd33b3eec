"""Estimators of KL(policy || reference) from the log-probabilities of sampled tokens.

Schulman, "Approximating KL Divergence" (2020), joschu.net/blog/kl-approx.html. All are per token,
in nats, with d = log p_ref - log p. The bounds are verl's (`kl_penalty` in core_algos.py): they
keep one very unlikely token from dominating the step.

Shape suffix: T tokens.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from treadle.policy.config.algorithm import KlType

MAX_LOG_RATIO: Final = 20.0
MAX_K3: Final = 10.0


def kl_penalty(logprobs_T: Tensor, ref_logprobs_T: Tensor, kind: KlType) -> Tensor:
    """Returns the penalty of each token.

    k1 = -d: unbiased, may be negative, and as a loss its expected gradient is zero.
    k2 = d^2 / 2: biased, low variance; its gradient is the unbiased one of the KL.
    k3 = exp(d) - 1 - d: unbiased, low variance, never negative; d is clamped to +-20 and the
    result to +-10.
    abs = |d|.
    With a "+" the value is the estimator's and the gradient that of k2, as in verl: the value is
    unbiased where k1's and k3's are, and so is the gradient.
    """
    if kind.endswith("+"):
        value_T = _estimate(logprobs_T.detach(), ref_logprobs_T, kind[:-1])
        k2_T = 0.5 * (logprobs_T - ref_logprobs_T).square()
        return k2_T - k2_T.detach() + value_T
    return _estimate(logprobs_T, ref_logprobs_T, kind)


def _estimate(logprobs_T: Tensor, ref_logprobs_T: Tensor, kind: str) -> Tensor:
    d_T = ref_logprobs_T - logprobs_T
    match kind:
        case "k1":
            return -d_T
        case "k2":
            return 0.5 * d_T.square()
        case "abs":
            return d_T.abs()
        case "k3":
            d_T = d_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            return (d_T.exp() - 1.0 - d_T).clamp(-MAX_K3, MAX_K3)
    raise ValueError(f"no estimator {kind!r}: k1, k2, k3, abs")
