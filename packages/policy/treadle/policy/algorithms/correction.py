"""Off-policy correction: weights and rejects tokens whose probability was another when sampled.

The ratio of a token is w = p / p_rollout: the policy's probability at the start of the batch
(`old_logprobs_T`), and the one that the server reported when it sampled. They differ between two
implementations of one model, and for tokens of older weights.

- Weights multiply the policy loss: truncated importance sampling (Yao et al. 2025, "Your Efficient
  RL Framework Secretly Brings You Off-Policy RL Training"); with outside=mask those out of the band
  count nothing (IcePop). With the clipped surrogate this is decoupled PPO (Hilton et al.,
  arXiv:2110.00641, equation 5; AReaL, arXiv:2505.24298, equation 5): p_old is the proximal policy.
- A rejection makes the loss of a token, or of a whole sample, 0 (Liu et al. 2025, "When Speed Kills
  Stability"); sample_mean_k1 bounds the geometric mean of a sample's ratios.

Invariant: where every w is 1, nothing changes. A token that counts nothing keeps its place in the
aggregation, so that no rejection makes other tokens weigh more. Nothing here has a gradient.

Shape suffix: T tokens that are trained on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.policy.algorithms.losses import MAX_LOG_RATIO, over_samples
from treadle.policy.backend import LossFn, LossInputs, LossOutput
from treadle.policy.config.correction import CorrectionConfig


def correction_weights(
    inputs: LossInputs, config: CorrectionConfig, *, of_current_policy: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns what to multiply each token's loss by, and metrics of what was cut.

    Args:
        of_current_policy: Take p from `logprobs_T`: where p_old is p_rollout itself.

    Raises:
        ValueError: There are no rollout log-probabilities.
    """
    if inputs.rollout_logprobs_T is None:
        raise ValueError("a correction is asked for, but the sequences have no rollout_logprobs")
    p_T = inputs.logprobs_T.detach() if of_current_policy else inputs.old_logprobs_T
    log_T = p_T - inputs.rollout_logprobs_T
    if config.tokens == "stale":
        log_T = torch.where(inputs.stale_T, log_T, 0.0)
    metrics: dict[str, Tensor] = {}
    weights_T = torch.ones_like(log_T)
    if config.weights != "none":
        total_T = log_T if config.weights == "token" else over_samples(log_T, inputs, "sum")
        weights_T = total_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        outside_T = (weights_T < config.low) | (weights_T > config.high)
        if config.outside == "truncate":
            weights_T = weights_T.clamp(config.low, config.high)
        else:
            weights_T = torch.where(outside_T, 0.0, weights_T)
        metrics["correction/weight"] = weights_T
        metrics["correction/outside"] = outside_T.float()
    rejected: dict[str, Tensor] = {
        name: _outside(name, bounds, log_T, inputs) for name, bounds in config.reject.items()
    }
    if config.veto is not None:
        rejected["veto"] = over_samples(log_T, inputs, "min") < math.log(config.veto)
    if rejected:
        any_T = torch.stack(list(rejected.values())).any(dim=0)
        weights_T = torch.where(any_T, 0.0, weights_T)
        metrics["correction/rejected"] = any_T.float()
        for name, rejected_T in rejected.items():
            metrics[f"correction/rejected_{name}"] = rejected_T.float()
    return weights_T, metrics


def _outside(name: str, bounds: tuple[float, ...], log_T: Tensor, inputs: LossInputs) -> Tensor:
    """Returns which tokens are out of the bounds of one criterion."""
    where, _, estimator = name.rpartition("_")
    log_T = log_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            values_T = log_T
        case "k2":
            values_T = 0.5 * log_T.square()
        case _:
            values_T = log_T.expm1() - log_T
    if where != "token":
        values_T = over_samples(values_T, inputs, where.removeprefix("sample_"))
    if estimator == "k1":
        low, high = bounds
        return (values_T < math.log(low)) | (values_T > math.log(high))
    return values_T > bounds[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """A policy loss, multiplied by the weights of the correction."""

    loss: LossFn
    config: CorrectionConfig
    of_current_policy: bool

    @property
    def zero_without_advantage(self) -> bool:
        """As of the loss: the weights are factors."""
        return self.loss.zero_without_advantage

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns the weighted loss of each token."""
        weights_T, metrics = correction_weights(
            inputs, self.config, of_current_policy=self.of_current_policy
        )
        output = self.loss(inputs)
        loss_T = output.loss_T * weights_T
        return LossOutput(
            loss_T=loss_T,
            metrics_T={**output.metrics_T, "actor/pg_loss": loss_T.detach(), **metrics},
        )
