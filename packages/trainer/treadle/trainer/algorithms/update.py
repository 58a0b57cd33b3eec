"""The update: one batch of scored trajectories becomes one or more optimizer steps.

Invariant: every update of a batch is taken against the policy as it was when the batch began. With
one update that is the policy itself, and nothing needs to be computed twice; with more, its
log-probabilities are computed first.

Called on every rank with the same arguments, as the methods of `PolicyBackend` are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.trainer.algorithms.loss import policy_loss

if TYPE_CHECKING:
    from treadle.trainer.config.algorithm import AlgorithmConfig
    from treadle.trainer.policy import PolicyBackend, StepStats, TrainSequence


def update_policy(
    policy: PolicyBackend, sequences: Sequence[TrainSequence], config: AlgorithmConfig
) -> list[StepStats]:
    """Train on one batch.

    Args:
        policy: Built with a reference if `config.needs_reference`.
        sequences: The batch, the members of a group adjacent; advantages filled in.
        config: Loss, epochs and mini-batches.

    Returns:
        One entry per optimizer step.

    Raises:
        ValueError: there are fewer sequences than mini-batches, no sequence of a mini-batch has a
            loss token, or `old_logprobs=rollout` and the sequences carry no rollout_logprobs.
    """
    prepared = _with_old_logprobs(policy, sequences, config)
    if config.needs_reference:
        reference = policy.reference_logprobs(prepared)
        prepared = [replace(s, ref_logprobs=r) for s, r in zip(prepared, reference, strict=True)]
    loss = policy_loss(config)
    return [
        policy.train_step(
            mini_batch,
            loss,
            aggregation=config.loss_aggregation,
            aggregation_length=config.aggregation_length,
        )
        for _ in range(config.epochs)
        for mini_batch in _cut(prepared, config.mini_batches)
    ]


def _with_old_logprobs(
    policy: PolicyBackend, sequences: Sequence[TrainSequence], config: AlgorithmConfig
) -> Sequence[TrainSequence]:
    if config.old_logprobs == "rollout":
        if any(s.rollout_logprobs is None for s in sequences):
            raise ValueError("algorithm.old_logprobs=rollout, but there are no rollout_logprobs")
        return [replace(s, old_logprobs=s.rollout_logprobs) for s in sequences]
    if config.updates_per_batch == 1:
        return sequences
    old = policy.logprobs(sequences)
    return [replace(s, old_logprobs=o) for s, o in zip(sequences, old, strict=True)]


def _cut(sequences: Sequence[TrainSequence], parts: int) -> Iterator[Sequence[TrainSequence]]:
    """Consecutive runs whose sizes differ by one at most."""
    if len(sequences) < parts:
        raise ValueError(f"cannot cut {len(sequences)} sequences into {parts} mini-batches")
    for part in range(parts):
        yield sequences[part * len(sequences) // parts : (part + 1) * len(sequences) // parts]
