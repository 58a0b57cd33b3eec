"""Losses: pure functions from one micro-batch's log-probabilities to one loss per token.

Invariant: a loss reduces nothing. The backend multiplies it by `policy/batch.py: token_weights`,
which are normalised once over the whole batch, and sums.

Shape suffix: T tokens that are trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from treadle.trainer.algorithms.kl import kl_penalty
from treadle.trainer.config.algorithm import AlgorithmConfig
from treadle.trainer.policy.backend import LossFn, LossInputs, LossOutput

MAX_LOG_RATIO: Final = 20.0


def policy_loss(config: AlgorithmConfig) -> LossFn:
    """Returns the loss that the settings describe."""
    return ClippedSurrogate(
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        clip_dual=config.clip_dual,
        kl_coef=config.kl_coef,
        kl_type=config.kl_type,
        entropy_coef=config.entropy_coef,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedSurrogate:
    """The clipped policy-gradient objective, negated.

    With r = exp(log p - log p_old), clamped at exp(+-20):

    - L1 = -A r and L2 = -A clip(r, 1 - low, 1 + high); the loss is max(L1, L2).
      PPO (arXiv:1707.06347), equation 7; high > low is DAPO's clip-higher (arXiv:2503.14476),
      equation 10.
    - For A < 0 the loss is at most -A c. Dual-clip PPO (arXiv:1912.09729), equation 5.
    - `kl_coef` times the KL penalty is added, `entropy_coef` times the entropy subtracted.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = 3.0
    kl_coef: float = 0.0
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = 0.0

    @property
    def zero_without_advantage(self) -> bool:
        """Only the surrogate is proportional to the advantage."""
        return self.kl_coef == 0.0 and self.entropy_coef == 0.0

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns the loss of each token.

        Raises:
            ValueError: `kl_coef` is above 0 and there are no reference log-probabilities.
        """
        advantages_T = inputs.advantages_T
        log_ratio_T = inputs.logprobs_T - inputs.old_logprobs_T
        ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        plain_T = -advantages_T * ratio_T
        clipped_T = -advantages_T * ratio_T.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        loss_T = torch.maximum(plain_T, clipped_T)
        metrics: dict[str, Tensor] = {
            "actor/pg_clipfrac": (clipped_T > plain_T).float(),
            "actor/ppo_kl": -log_ratio_T.detach(),
        }
        if self.clip_dual is not None:
            bound_T = -advantages_T * self.clip_dual
            over_T = (advantages_T < 0) & (loss_T > bound_T)
            metrics["actor/pg_clipfrac_lower"] = over_T.float()
            loss_T = torch.where(over_T, bound_T, loss_T)
        metrics["actor/pg_loss"] = loss_T.detach()
        if self.kl_coef:
            if inputs.ref_logprobs_T is None:
                raise ValueError("kl_coef is above 0, but the sequences have no ref_logprobs")
            kl_T = kl_penalty(inputs.logprobs_T, inputs.ref_logprobs_T, self.kl_type)
            metrics["actor/kl_loss"] = kl_T.detach()
            loss_T = loss_T + self.kl_coef * kl_T
        if self.entropy_coef:
            loss_T = loss_T - self.entropy_coef * inputs.entropy_T
        return LossOutput(loss_T=loss_T, metrics_T=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class NegativeLogLikelihood:
    """Supervised fine-tuning: -log p of the tokens in the loss mask. Advantages are not read."""

    @property
    def zero_without_advantage(self) -> bool:
        """Every token in the mask has a gradient."""
        return False

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns the loss; of `inputs` it needs only the log-probabilities."""
        return LossOutput(loss_T=-inputs.logprobs_T)
