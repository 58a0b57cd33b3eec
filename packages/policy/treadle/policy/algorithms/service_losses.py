"""Losses as clients of a training service name them: of given weights, advantages and old values.

Invariant: a loss has one value per token and is unclamped, so that its sum is the formula of its
docstring, and every token goes through the model, because a client reads the log-probabilities of
all of them. They are loaded by name, as the user's own losses are.

r = exp(log p - log q), q is what sampled; A is the advantage (of `weighted` the weight), and sg
stops the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.policy.algorithms.losses import over_samples
from treadle.policy.backend import LossInputs

__all__ = ["cispo", "clipped", "dro", "gspo", "importance", "weighted"]


def _ratio(inputs: LossInputs) -> Tensor:
    return (inputs.logprobs_T - inputs.old_logprobs_T).exp()


def weighted(inputs: LossInputs) -> Tensor:
    """Returns -A log p: cross-entropy, and the gradient of any loss of log p in the weights."""
    return -inputs.advantages_T * inputs.logprobs_T


def importance(inputs: LossInputs) -> Tensor:
    """Returns -A r."""
    return -inputs.advantages_T * _ratio(inputs)


def clipped(inputs: LossInputs, *, low: float, high: float) -> Tensor:
    """Returns -min(A r, A clip(r, low, high))."""
    ratio_T, advantages_T = _ratio(inputs), inputs.advantages_T
    return -torch.minimum(advantages_T * ratio_T, advantages_T * ratio_T.clamp(low, high))


def cispo(inputs: LossInputs, *, low: float, high: float) -> Tensor:
    """Returns -A sg(clip(r, low, high)) log p."""
    weight_T = _ratio(inputs).detach().clamp(low, high)
    return -weight_T * inputs.advantages_T * inputs.logprobs_T


def dro(inputs: LossInputs, *, beta: float) -> Tensor:
    """Returns -(A log p - beta / 2 (log p - log q)^2)."""
    quadratic_T = (inputs.logprobs_T - inputs.old_logprobs_T).square()
    return -(inputs.advantages_T * inputs.logprobs_T - 0.5 * beta * quadratic_T)


def gspo(inputs: LossInputs, *, low: float, high: float) -> Tensor:
    """Returns -min(A s, A clip(s, low, high)), s = sg(exp(mean log r of the sample)) p / sg(p)."""
    logprobs_T, advantages_T = inputs.logprobs_T, inputs.advantages_T
    means_T = over_samples(logprobs_T - inputs.old_logprobs_T, inputs, "mean")
    ratio_T = (means_T + (logprobs_T - logprobs_T.detach())).exp()
    return -torch.minimum(advantages_T * ratio_T, advantages_T * ratio_T.clamp(low, high))
