"""The critic's settings: read with algorithm.advantage=gae only."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from treadle.policy.config.base import Section
from treadle.policy.config.policy import OptimizerConfig

__all__ = ["CriticConfig"]


class CriticOptimizerConfig(OptimizerConfig):
    """The critic's optimizer, and its learning rate over the critic's optimizer steps."""

    lr: float = Field(default=1e-5, gt=0)
    """Learning rate after warm-up."""


class CriticConfig(Section):
    """The critic: a second model, which starts from the policy's weights and estimates returns.

    It exists with algorithm.advantage=gae only. It shares the policy's processes, layout
    and precision, and is updated on the same mini-batches.
    """

    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """The optimizer and its learning rate."""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Number of passes over a batch. Null: algorithm.epochs."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of training steps at the beginning in which only the critic learns, and the policy
    stays as it is."""
    clip_value: Annotated[float, Field(gt=0)] | None = 0.5
    """Maximum distance, in units of the reward, that a value may move in a batch before it has no
    gradient to move further. Null: no maximum."""
