"""Groups: the trajectories of a step, compared within their rows, as sequences to train on.

Survivor rule: a trajectory that failed is never trained on, and its group goes on without it. A
group of which fewer than two are left says nothing about what was better than what, so it is
left out whole. Every loss is counted. A step of which no group is left cannot be trained on.

A trajectory counts once in its group, however many samples it has; each of them becomes a
sequence with the trajectory's advantage, and counts with the others as one in the loss
(`batch.token_weights`). A sample without a sampled token is no sequence.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from treadle.agent_loop import Tokens, Trajectory, TrajectoryTimeoutError
from treadle.trainer.algorithms.advantages import group_advantages
from treadle.trainer.policy.types import TrainSequence

__all__ = ["NoGroupLeftError", "StepBatch", "make_batch"]


class NoGroupLeftError(RuntimeError):
    """No group of a step can be trained on; the message says what became of the trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """What a step trains on.

    Attributes:
        sequences: Of the surviving groups, group by group.
        num_groups: Groups that the step began with.
        num_dropped_groups: Groups left out.
        num_failed: Trajectories that failed.
        num_incomplete_groups: Groups that are trained on without some of their trajectories.
        num_stragglers: Trajectories among the failed that passed their deadline.
        num_groups_with_signal: Groups whose rewards differ; the others have advantage 0.
        causes: A line for each kind of failure, with how often it happened.
    """

    sequences: tuple[TrainSequence, ...]
    num_groups: int
    num_dropped_groups: int
    num_failed: int
    num_incomplete_groups: int
    num_stragglers: int
    num_groups_with_signal: int
    causes: tuple[str, ...]

    def metrics(self) -> dict[str, float]:
        """The counts as metrics."""
        trained = self.num_groups - self.num_dropped_groups
        return {
            "groups/trained": trained,
            "groups/dropped": self.num_dropped_groups,
            "groups/incomplete": self.num_incomplete_groups,
            "groups/stragglers": self.num_stragglers,
            "groups/with_signal": self.num_groups_with_signal / trained,
            "sequences/trained": len(self.sequences),
        }


def make_batch(trajectories: Sequence[Trajectory], *, norm_by_std: bool, version: int) -> StepBatch:
    """The batch of a step.

    Args:
        trajectories: In the order of the step's tasks, so that groups are adjacent.
        norm_by_std: See `group_advantages`.
        version: Of the policy's weights; tokens of older ones are marked.

    Raises:
        NoGroupLeftError: no group has enough survivors.
    """
    groups = [
        list(members)
        for _, members in itertools.groupby(trajectories, key=lambda t: t.task.task_id)
    ]
    needed = 2 if any(len(group) > 1 for group in groups) else 1
    survivors = [[t for t in group if t.error is None] for group in groups]
    kept = [group for group in survivors if len(group) >= needed]
    failed = [t for t in trajectories if t.error is not None]
    causes = tuple(_causes(failed))
    if not kept:
        raise NoGroupLeftError(
            f"none of {len(groups)} groups has {needed} trajectories that ended well "
            f"({len(failed)} of {len(trajectories)} failed): " + "; ".join(causes)
        )
    members = [trajectory for group in kept for trajectory in group]
    advantages = group_advantages(
        [_reward(t) for t in members], [t.task.task_id for t in members], norm_by_std=norm_by_std
    )
    sequences = tuple(
        _sequence(sample, advantage, number if len(trajectory.samples) > 1 else None, version)
        for number, (trajectory, advantage) in enumerate(zip(members, advantages, strict=True))
        for sample in trajectory.samples
        if sample.num_sampled_tokens
    )
    if not sequences:
        raise NoGroupLeftError(
            f"none of the {len(members)} trajectories that ended well has a sampled token"
        )
    return StepBatch(
        sequences=sequences,
        num_groups=len(groups),
        num_dropped_groups=len(groups) - len(kept),
        num_failed=len(failed),
        num_incomplete_groups=sum(
            needed <= len(left) < len(group) for group, left in zip(groups, survivors, strict=True)
        ),
        num_stragglers=sum(isinstance(t.error, TrajectoryTimeoutError) for t in failed),
        num_groups_with_signal=sum(len({_reward(t) for t in group}) > 1 for group in kept),
        causes=causes,
    )


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None, "every trajectory that ended well has been scored"
    return trajectory.reward


def _sequence(
    tokens: Tokens, advantage: float, trajectory: int | None, version: int
) -> TrainSequence:
    return TrainSequence(
        ids=tokens.ids,
        loss_mask=tokens.loss_mask,
        rollout_logprobs=tokens.logprobs,
        advantages=(advantage,) * len(tokens.ids),
        trajectory=trajectory,
        stale=_stale(tokens, version),
    )


def _stale(tokens: Tokens, version: int) -> tuple[bool, ...] | None:
    """Per token; spans that touch are one completion, to which updates came in between."""
    stale = [False] * len(tokens.ids)
    last_stop = -1
    for span in tokens.spans:
        if span.weight_version is None:
            continue
        older = span.weight_version < version
        goes_on = span.start == last_stop and stale[last_stop - 1]
        stale[span.start : span.stop] = [older or goes_on] * (span.stop - span.start)
        last_stop = span.stop
    return tuple(stale) if any(stale) else None


def _causes(failed: Iterable[Trajectory]) -> Iterable[str]:
    """`3 x GenerationTimeoutError, as: ...`, the most frequent first."""
    by_kind: dict[str, list[str]] = {}
    for trajectory in failed:
        error = trajectory.error
        by_kind.setdefault(type(error).__name__, []).append(str(error))
    for kind, texts in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        yield f"{len(texts)} x {kind}, as: {texts[0]}"
