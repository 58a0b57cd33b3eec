"""The policy update: the optimizer steps of one batch of sequences.

Runs on every rank at once, with the same arguments (see `policy/backend.py`). The order is
fixed: log-probabilities of the policy before the batch, if the ratio needs them; those of the
reference, if the loss needs them; then `epochs` x `mini_batches` optimizer steps.
"""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from treadle.trainer.algorithms.losses import policy_loss
from treadle.trainer.algorithms.mismatch import mismatch_metrics
from treadle.trainer.config.algorithm import AlgorithmConfig
from treadle.trainer.policy.backend import PolicyBackend
from treadle.trainer.policy.commands import UpdateStats
from treadle.trainer.policy.types import TrainSequence

__all__ = ["cut", "run_update"]


def cut(sequences: Sequence[TrainSequence], parts: int) -> list[Sequence[TrainSequence]]:
    """Cuts into contiguous parts, none empty, whose numbers of trajectories differ by at most 1."""
    starts = [
        index
        for index, sequence in enumerate(sequences)
        if index == 0
        or sequence.trajectory is None
        or sequence.trajectory != sequences[index - 1].trajectory
    ]
    parts = min(parts, len(starts))
    firsts = [starts[len(starts) * part // parts] for part in range(parts)]
    return [sequences[start:stop] for start, stop in itertools.pairwise((*firsts, len(sequences)))]


def run_update(
    policy: PolicyBackend,
    sequences: Sequence[TrainSequence],
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    free_memory: bool = False,
) -> UpdateStats:
    """Trains on a batch that was sampled with `temperature`; see the module.

    With `free_memory`, cached device memory is released at the end, for other processes.
    """
    started = time.perf_counter()
    prepared = _with_old_logprobs(policy, sequences, algorithm, temperature)
    computed = algorithm.old_logprobs == "policy" and algorithm.updates_per_batch > 1
    mismatch = _mismatch(prepared) if computed else None
    if algorithm.needs_reference:
        reference = policy.reference_logprobs(prepared, temperature=temperature)
        prepared = [
            replace(sequence, ref_logprobs=logprobs)
            for sequence, logprobs in zip(prepared, reference, strict=True)
        ]
    logprobs_s = time.perf_counter() - started
    loss = policy_loss(algorithm)
    steps = tuple(
        policy.train_step(
            part,
            loss,
            aggregation=algorithm.loss_aggregation,
            aggregation_length=algorithm.aggregation_length,
            temperature=temperature,
        )
        for _ in range(algorithm.epochs)
        for part in cut(prepared, algorithm.mini_batches)
    )
    if free_memory:
        torch.cuda.empty_cache()  # does nothing without CUDA
    return UpdateStats(
        steps=steps,
        broken=_not_finite(policy, sequences, temperature),
        logprobs_s=logprobs_s,
        mismatch=mismatch,
    )


def _not_finite(
    policy: PolicyBackend, sequences: Sequence[TrainSequence], temperature: float
) -> str | None:
    """Returns what is not finite; finite weights may be so large that what they compute is not."""
    if not policy.weights_are_finite():
        return "weights that are not finite"
    probe = min((s for s in sequences if s.num_loss_tokens), key=lambda s: len(s.ids))
    (logprobs,) = policy.logprobs([probe], temperature=temperature)
    if not all(map(math.isfinite, logprobs)):
        return "weights with which log-probabilities are not finite"
    return None


def _with_old_logprobs(
    policy: PolicyBackend,
    sequences: Sequence[TrainSequence],
    algorithm: AlgorithmConfig,
    temperature: float,
) -> list[TrainSequence]:
    if algorithm.old_logprobs == "rollout":
        return [replace(sequence, old_logprobs=sequence.rollout_logprobs) for sequence in sequences]
    if algorithm.updates_per_batch == 1:
        return list(sequences)  # the step's own log-probabilities, detached, serve as the old ones
    old = policy.logprobs(sequences, temperature=temperature)
    return [
        replace(sequence, old_logprobs=logprobs)
        for sequence, logprobs in zip(sequences, old, strict=True)
    ]


def _mismatch(sequences: Sequence[TrainSequence]) -> Mapping[str, float] | None:
    """Returns metrics of sequences with old log-probabilities; None if no engine sampled them."""
    gaps: list[float] = []
    stale: list[bool] = []
    for sequence in sequences:
        ours, theirs = sequence.old_logprobs, sequence.rollout_logprobs
        if ours is None or theirs is None:
            return None
        flags = sequence.stale or (False,) * len(sequence.ids)
        places = [t for t, masked in enumerate(sequence.loss_mask) if masked]
        gaps += [ours[t] - theirs[t] for t in places]
        stale += [flags[t] for t in places]
    return mismatch_metrics(torch.tensor(gaps), torch.tensor(stale)) if gaps else None
