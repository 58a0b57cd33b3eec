"""Fine-tuning of a policy in this process; `treadle sft` has it done by the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.policy.backend import PolicyBackend
    from treadle.policy.client.types import LossAggregation, StepStats, TrainSequence

__all__ = ["fine_tune"]


def fine_tune(
    policy: PolicyBackend,
    batches: Iterable[Sequence[TrainSequence]],
    *,
    aggregation: LossAggregation = "token-mean",
) -> Iterator[StepStats]:
    """Takes one optimizer step per batch, on the mean loss over its sampled tokens.

    Args:
        policy: Stepped in place, with the optimizer and schedule of its configuration.
        batches: Consumed one per step; may be a generator.

    Yields:
        The statistics of each step.
    """
    from treadle.policy.algorithms.losses import NegativeLogLikelihood

    for batch in batches:
        yield policy.train_step(batch, NegativeLogLikelihood(), aggregation=aggregation)
