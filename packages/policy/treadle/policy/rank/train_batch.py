"""The policy update, and the critic's: the optimizer steps of one batch of sequences.

Runs on every rank at once, with the same arguments (see `policy/backend.py`). The order is
fixed: log-probabilities of the policy before the batch, if the ratio needs them; those of the
reference, if the loss needs them (neither is computed again where sequences have them); then
`epochs` x `mini_batches` optimizer steps, each after the selection of tokens, if the loss needs
one.
The critic learns from the same mini-batches.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from google.protobuf.message import Message
from numpy.typing import NDArray

from treadle.agent_loop import FloatArray
from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.algorithms.kl import kl_penalty
from treadle.policy.algorithms.losses import NegativeLogLikelihood
from treadle.policy.algorithms.mismatch import mismatch_metrics
from treadle.policy.algorithms.token_selection import token_selector
from treadle.policy.backend import CriticBackend, LossFn, PolicyBackend
from treadle.policy.backends.usage import step_usage
from treadle.policy.client.batch import cut, of_loss_tokens
from treadle.policy.client.types import (
    LossAggregation,
    LossStats,
    OptimizerStats,
    StepStats,
    TrainSequence,
)
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.rank_time import spent_on
from treadle.policy.v1 import training_service_pb2 as pb

__all__ = [
    "at_loss_tokens",
    "measure_reference",
    "not_finite",
    "run_critic_update",
    "run_fine_tune",
    "run_forward_backward",
    "run_update",
    "stats_message",
]

M = TypeVar("M", bound=Message)


def run_update(
    policy: PolicyBackend,
    sequences: Sequence[TrainSequence],
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    free_memory: bool = False,
) -> pb.UpdateResponse:
    """Trains on a batch that was sampled with `temperature`; see the module.

    With `free_memory`, cached device memory is released at the end, for other processes.
    """
    started = time.perf_counter()
    with spent_on("logprobs"):
        prepared = _with_old_logprobs(policy, sequences, algorithm, temperature)
        computed = algorithm.old_logprobs == "policy" and algorithm.updates_per_batch > 1
        mismatch = _mismatch(policy, prepared) if computed else None
        if algorithm.loss_needs_reference and prepared[0].ref_logprobs is None:
            reference = policy.reference_logprobs(prepared, temperature=temperature)
            prepared = [
                replace(sequence, ref_logprobs=logprobs)
                for sequence, logprobs in zip(prepared, reference, strict=True)
            ]
    logprobs_s = time.perf_counter() - started
    loss, select = policy_loss(algorithm), token_selector(algorithm)
    if select is not None:
        prepared = _with_values_of_all(policy, prepared, ("advantages", "old_logprobs"))

    def with_selection(part: Sequence[TrainSequence]) -> Sequence[TrainSequence]:
        if select is None:
            return part
        with spent_on("logprobs"):
            return select(part, policy.logprobs(part, temperature=temperature), policy.step)

    steps = [
        _measured_step(
            policy,
            with_selection(part),
            loss,
            aggregation=algorithm.loss_aggregation,
            aggregation_length=algorithm.aggregation_length,
            temperature=temperature,
            keep_tokens=epoch == 0,
        )
        for epoch in range(algorithm.epochs)
        for part in cut(prepared, algorithm.mini_batches)
    ]
    if free_memory:
        torch.cuda.empty_cache()  # does nothing without CUDA
    return pb.UpdateResponse(
        steps=[stats_message(pb.StepStats, step) for step in steps],
        broken=not_finite(policy, sequences, temperature),
        logprobs_s=logprobs_s,
        mismatch=mismatch,
        tokens=_token_values(policy, steps, prepared if computed else None),
    )


def _measured_step(
    policy: PolicyBackend, sequences: Sequence[TrainSequence], loss: LossFn, **settings: Any
) -> StepStats:
    """Takes a step, and adds to its metrics how well the device was used."""
    if policy.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = policy.train_step(sequences, loss, **settings)
    return replace(step, metrics={**step.metrics, **step_usage(policy, sequences, step)})


def measure_reference(
    policy: PolicyBackend,
    sequences: Sequence[TrainSequence],
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
) -> pb.MeasureReferenceResponse:
    """Computes the KL of a batch against the reference, at the weights before its updates.

    Where `algorithm.old_logprobs=rollout`, the servers' log-probabilities are the policy's.
    """
    ours: list[FloatArray] = []
    if algorithm.old_logprobs == "policy":
        ours = policy.logprobs(sequences, temperature=temperature)
    else:
        for sequence in sequences:
            assert sequence.rollout_logprobs is not None, "a rollout always has them"
            ours.append(sequence.rollout_logprobs)
    given = [s.ref_logprobs for s in sequences if s.ref_logprobs is not None]
    # Rollout servers that hold the reference were asked already.
    theirs = given or policy.reference_logprobs(sequences, temperature=temperature)
    kl_M = _of_all(
        policy,
        sequences,
        [
            kl_penalty(_tensor(p), _tensor(ref), algorithm.reward_kl.type).numpy()[s.loss_positions]
            for s, p, ref in zip(sequences, ours, theirs, strict=True)
        ],
    )
    shares_old = algorithm.old_logprobs == "policy" and algorithm.updates_per_batch > 1
    shares_ref = algorithm.loss_needs_reference and not given
    return pb.MeasureReferenceResponse(
        kl=kl_M.astype("<f4").tobytes(),
        old_logprobs=at_loss_tokens(sequences, ours) if shares_old else None,
        ref_logprobs=at_loss_tokens(sequences, theirs) if shares_ref else None,
    )


def run_critic_update(
    critic: CriticBackend,
    sequences: Sequence[TrainSequence],
    algorithm: AlgorithmConfig,
    *,
    epochs: int,
    free_memory: bool = False,
) -> pb.UpdateCriticResponse:
    """Teaches the critic the returns of a batch: `epochs` x `mini_batches` optimizer steps.

    Args:
        free_memory: Whether cached device memory is released at the end, for other processes.
    """
    steps = tuple(
        critic.train_step(
            part,
            aggregation=algorithm.loss_aggregation,
            aggregation_length=algorithm.aggregation_length,
        )
        for _ in range(epochs)
        for part in cut(sequences, algorithm.mini_batches)
    )
    if free_memory:
        torch.cuda.empty_cache()
    return pb.UpdateCriticResponse(
        steps=[stats_message(pb.StepStats, step) for step in steps],
        broken=_not_finite_critic(critic, sequences),
    )


def run_fine_tune(
    policy: PolicyBackend, sequences: Sequence[TrainSequence], aggregation: LossAggregation
) -> pb.FineTuneResponse:
    """Takes one optimizer step on what the assistant said, and looks at what it left."""
    step = _measured_step(policy, sequences, NegativeLogLikelihood(), aggregation=aggregation)
    return pb.FineTuneResponse(
        steps=[stats_message(pb.StepStats, step)], broken=not_finite(policy, sequences, 1.0)
    )


def run_forward_backward(
    policy: PolicyBackend,
    sequences: Sequence[TrainSequence],
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    keep_tokens: bool = False,
) -> pb.ForwardBackwardResponse:
    """Adds the gradient of a batch to that of the next step; see `run_update`."""
    statistics = policy.add_gradient(
        _with_old_logprobs(policy, sequences, algorithm, temperature),
        policy_loss(algorithm),
        aggregation=algorithm.loss_aggregation,
        aggregation_length=algorithm.aggregation_length,
        temperature=temperature,
        keep_tokens=keep_tokens,
    )
    stats = statistics()
    response = stats_message(pb.ForwardBackwardResponse, stats)
    if stats.tokens is not None:
        values = _token_message(stats.tokens.logprobs_M, stats.tokens.entropy_M)
        response.tokens.CopyFrom(values)
    return response


def stats_message(kind: type[M], stats: LossStats | OptimizerStats) -> M:
    """Returns statistics as a message of a kind; without what was kept of the tokens."""
    names = (name for name in kind.DESCRIPTOR.fields_by_name if name != "tokens")
    return kind(**{name: getattr(stats, name) for name in names})


def _token_message(
    logprobs_M: NDArray[np.float32], entropy_M: NDArray[np.float32]
) -> pb.TokenValues:
    return pb.TokenValues(
        logprobs=logprobs_M.astype("<f4").tobytes(), entropy=entropy_M.astype("<f4").tobytes()
    )


def at_loss_tokens(sequences: Sequence[TrainSequence], values: Sequence[FloatArray]) -> bytes:
    """Returns [L] of each sequence as float32 of all loss tokens."""
    found = [np.asarray(v, "<f4")[s.loss_positions] for s, v in zip(sequences, values, strict=True)]
    return np.concatenate(found).tobytes()


def _not_finite_critic(critic: CriticBackend, sequences: Sequence[TrainSequence]) -> str | None:
    """Returns what of a critic is not finite; see `not_finite`."""
    if not critic.weights_are_finite():
        return "a critic with weights that are not finite"
    (values,) = critic.values([_shortest(sequences)])
    if not np.isfinite(values).all():
        return "a critic with weights with which values are not finite"
    return None


def _shortest(sequences: Sequence[TrainSequence]) -> TrainSequence:
    """Returns the sequence that costs least to compute."""
    return min((s for s in sequences if s.num_loss_tokens), key=lambda s: len(s.ids))


def not_finite(
    policy: PolicyBackend, sequences: Sequence[TrainSequence], temperature: float
) -> str | None:
    """Returns what is not finite; finite weights may be so large that what they compute is not."""
    if not policy.weights_are_finite():
        return "weights that are not finite"
    (logprobs,) = policy.logprobs([_shortest(sequences)], temperature=temperature)
    if not np.isfinite(logprobs).all():
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
    if sequences[0].old_logprobs is not None:
        return list(sequences)
    old = policy.logprobs(sequences, temperature=temperature)
    return [
        replace(sequence, old_logprobs=logprobs)
        for sequence, logprobs in zip(sequences, old, strict=True)
    ]


def _token_values(
    policy: PolicyBackend,
    steps: Sequence[StepStats],
    measured: Sequence[TrainSequence] | None,
) -> pb.TokenValues:
    """Returns the values of all loss tokens of the batch.

    Args:
        steps: Each of the first epoch has the values of its mini-batch.
        measured: The batch with the policy's log-probabilities before the update, if there are any.
    """
    kept = [step.tokens for step in steps if step.tokens is not None]
    logprobs_M = np.concatenate([tokens.logprobs_M for tokens in kept])
    if measured is not None:
        before = [s.at_loss_tokens("old_logprobs") for s in measured]
        logprobs_M = _of_all(policy, measured, before)
    return _token_message(logprobs_M, np.concatenate([tokens.entropy_M for tokens in kept]))


def _mismatch(
    policy: PolicyBackend, sequences: Sequence[TrainSequence]
) -> Mapping[str, float] | None:
    """Returns metrics of sequences with old log-probabilities; None if no engine sampled them."""
    if any(s.old_logprobs is None or s.rollout_logprobs is None for s in sequences):
        return None
    ours = [s.at_loss_tokens("old_logprobs") for s in sequences]
    theirs = [s.at_loss_tokens("rollout_logprobs") for s in sequences]
    gaps_M = _of_all(policy, sequences, [p - q for p, q in zip(ours, theirs, strict=True)])
    stale = [s.flags_at_loss_tokens("stale").astype(np.float32) for s in sequences]
    stale_M = _of_all(policy, sequences, stale).astype(np.bool_)
    if not len(gaps_M):
        return None
    return mismatch_metrics(torch.from_numpy(gaps_M), torch.from_numpy(stale_M))


def _of_all(
    policy: PolicyBackend,
    sequences: Sequence[TrainSequence],
    values: Sequence[NDArray[np.float32]],
) -> NDArray[np.float32]:
    """Returns the [M] values of all loss tokens, where this rank may hold only its shard's.

    Args:
        values: [M] of each sequence; nothing is read of an outline's.
    """
    own = [
        np.zeros_like(each) if sequence.is_outline else each
        for sequence, each in zip(sequences, values, strict=True)
    ]
    own_M = np.concatenate(own)
    return own_M if sequences[0].shard is None else policy.sum_over_shards(own_M)


def _with_values_of_all(
    policy: PolicyBackend, sequences: Sequence[TrainSequence], names: Sequence[str]
) -> list[TrainSequence]:
    """Returns the batch whose outlines have the true values of some fields, where they differ."""
    found = list(sequences)
    for name in names:
        if any(getattr(s, name) is None for s in sequences):
            continue
        values_M = _of_all(policy, sequences, [s.at_loss_tokens(name) for s in sequences])
        changed: list[dict[str, Any]] = [
            {name: each} for each in of_loss_tokens(sequences, values_M)
        ]
        found = [
            replace(s, **change) if s.is_outline else s
            for s, change in zip(found, changed, strict=True)
        ]
    return found


def _tensor(values: FloatArray) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32))
