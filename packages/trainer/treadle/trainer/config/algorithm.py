"""The algorithm's settings: advantages, the policy loss, and how a batch becomes updates.

Invariant: one default for each value, here; the formulas are in `treadle.trainer.algorithms`.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from treadle.trainer.policy.types import LossAggregation


class AlgorithmConfig(BaseModel):
    """Group-relative policy optimisation with a clipped, dual-clipped surrogate."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: Literal["grpo"] = "grpo"
    """grpo: the advantage of a trajectory is its reward relative to its group's."""
    norm_by_std: bool = True
    """Divide the advantage by the group's standard deviation (GRPO). False is Dr. GRPO."""
    epochs: int = Field(default=1, ge=1)
    """Times that a batch is gone through."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps in each epoch; the batch is cut into this many parts of whole trajectories,
    in order."""
    old_logprobs: Literal["policy", "rollout"] = "policy"
    """Whose log-probabilities the ratio is taken against. policy: the trainer's own at the start
    of the batch (recomputed only when the batch gives more than one update). rollout: those that
    the engine reported, so that the difference between engine and trainer is corrected too."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 + clip_high; 0.28 is DAPO's clip-higher."""
    clip_dual: float | None = Field(default=3.0, gt=1)
    """With a negative advantage the loss is at most clip_dual times |advantage|. None: no bound."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty against the weights that training started from. Above 0 keeps a
    second copy of them in memory."""
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL penalty."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    loss_aggregation: LossAggregation = "token-mean"
    """How the losses of tokens become one number, always over the whole mini-batch. A sequence is a
    trajectory, all its samples together."""
    aggregation_length: int | None = Field(default=None, ge=1)
    """The constant divisor, in tokens, of loss_aggregation=seq-mean-token-sum-norm."""

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps that one batch gives."""
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
                "aggregation_length belongs to loss_aggregation=seq-mean-token-sum-norm and only"
                f" to it; got aggregation_length={self.aggregation_length} with"
                f" loss_aggregation={self.loss_aggregation}"
            )
        return self
