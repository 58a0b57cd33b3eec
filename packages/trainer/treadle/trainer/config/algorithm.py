"""The algorithm's settings: advantages, the policy loss, and how a batch becomes updates.

Invariant: each value has one default, here; the formulas are in `treadle.trainer.algorithms`.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from treadle.trainer.policy.types import LossAggregation


class AlgorithmConfig(BaseModel):
    """Group-relative policy optimisation with a clipped, dual-clipped surrogate."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: Literal["grpo"] = "grpo"
    """grpo: the advantage of a trajectory is its reward relative to the rewards of its group."""
    norm_by_std: bool = True
    """Divide the advantage by the group's standard deviation (GRPO). False is Dr. GRPO."""
    epochs: int = Field(default=1, ge=1)
    """Number of passes over a batch."""
    mini_batches: int = Field(default=1, ge=1)
    """Number of optimizer steps per epoch; the batch is split into this many parts of whole
    trajectories, in order."""
    old_logprobs: Literal["policy", "rollout"] = "policy"
    """Log-probabilities in the denominator of the ratio. policy: the trainer's at the start of the
    batch (recomputed only when the batch gives more than one update). rollout: those that the
    engine reported, which also corrects the difference between engine and trainer."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """Lower bound of the ratio: 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """Upper bound of the ratio: 1 + clip_high. DAPO's clip-higher uses 0.28."""
    clip_dual: float | None = Field(default=3.0, gt=1)
    """Maximum loss of a token with a negative advantage, as a multiple of |advantage|. Null: no
    maximum."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the KL penalty against the initial weights. Above 0, a second copy of the
    weights stays in memory."""
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL penalty."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy bonus."""
    loss_aggregation: LossAggregation = "token-mean"
    """How the losses of tokens are reduced to one number, over the whole mini-batch. A sequence is
    a trajectory with all its samples."""
    aggregation_length: int | None = Field(default=None, ge=1)
    """Constant divisor of loss_aggregation=seq-mean-token-sum-norm, in tokens."""

    @property
    def updates_per_batch(self) -> int:
        """Number of optimizer steps per batch."""
        return self.epochs * self.mini_batches

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads `ref_logprobs`."""
        return self.kl_coef > 0

    @model_validator(mode="after")
    def _length_goes_with_its_mode(self) -> Self:
        by_constant = self.loss_aggregation == "seq-mean-token-sum-norm"
        if by_constant != (self.aggregation_length is not None):
            raise ValueError(
                "aggregation_length must be set with loss_aggregation=seq-mean-token-sum-norm, and"
                f" only then; got aggregation_length={self.aggregation_length} with"
                f" loss_aggregation={self.loss_aggregation}"
            )
        return self
