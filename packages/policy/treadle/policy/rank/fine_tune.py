"""Fine-tuning on the policy ranks: optimizer steps on what the assistant said, and its loss.

Everything is collective, like the policy (see `policy/backend.py`). torch is imported where a step
is taken, so that the driver can import this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from treadle.policy.v1 import training_service_pb2 as pb

if TYPE_CHECKING:
    from treadle.policy.backend import PolicyBackend
    from treadle.policy.client.types import LossAggregation, StepStats, TrainSequence

__all__ = ["fine_tune", "logprob_sums", "run_fine_tune"]


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
        aggregation: How the losses of tokens become the mean.

    Yields:
        The statistics of each step.
    """
    from treadle.policy.algorithms.losses import NegativeLogLikelihood

    loss = NegativeLogLikelihood()
    for batch in batches:
        yield policy.train_step(batch, loss, aggregation=aggregation)


def run_fine_tune(
    policy: PolicyBackend, sequences: Sequence[TrainSequence], aggregation: LossAggregation
) -> pb.FineTuneResponse:
    """Takes one optimizer step, and looks at what it left."""
    from treadle.policy.rank.train_batch import not_finite, stats_message

    steps = fine_tune(policy, [sequences], aggregation=aggregation)
    messages = [stats_message(pb.StepStats, step) for step in steps]
    return pb.FineTuneResponse(steps=messages, broken=not_finite(policy, sequences, 1.0))


def logprob_sums(policy: PolicyBackend, sequences: Sequence[TrainSequence]) -> tuple[float, ...]:
    """Returns of each sequence the log-probability of its loss tokens together, in nats."""
    return tuple(map(sum, policy.logprobs(sequences)))
