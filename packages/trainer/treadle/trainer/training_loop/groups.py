"""Groups: compares the trajectories of each row and makes sequences to train on.

Survivor rule: a trajectory that failed is never trained on, and its group continues without it. A
group with fewer than two survivors is dropped, since it has nothing to compare. All losses are
counted. A step without any group left cannot be trained on.

A trajectory counts once in its group, whatever its number of samples. Each sample becomes a
sequence with the trajectory's advantage; together they count as one in the loss
(`batch.token_weights`). A sample without sampled tokens becomes no sequence.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from treadle.agent_loop import Tokens, Trajectory, TrajectoryTimeoutError
from treadle.trainer.algorithms.advantages import group_advantages
from treadle.trainer.policy.types import TrainSequence
from treadle.trainer.report.failures import causes as causes_of

__all__ = ["NoGroupLeftError", "StepBatch", "make_batch", "trajectory_advantages"]


class NoGroupLeftError(RuntimeError):
    """No group of a step can be trained on; the message says how the trajectories ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """What a step trains on.

    Attributes:
        sequences: Of the surviving groups, group by group.
        num_groups: Number of groups before any was dropped.
        num_dropped_groups: Number of groups left out.
        num_failed: Number of trajectories that failed.
        num_incomplete_groups: Number of groups trained on without some of their trajectories.
        num_stragglers: Number of trajectories that failed because they passed their deadline.
        num_groups_with_signal: Number of groups whose rewards differ; all others have advantage 0.
        causes: One line per kind of failure, with its count.
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
        """Returns the counts as metrics."""
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
    """Returns the batch of a step.

    Args:
        trajectories: In the order of the step's tasks, so that groups are adjacent.
        norm_by_std: See `group_advantages`.
        version: Of the policy's weights; tokens of older versions are marked stale.

    Raises:
        NoGroupLeftError: no group has enough survivors.
    """
    groups = _groups(trajectories)
    needed = _survivors_needed(groups)
    survivors = [[t for t in group if t.error is None] for group in groups]
    kept = [group for group in survivors if len(group) >= needed]
    failed = [t for t in trajectories if t.error is not None]
    causes = tuple(causes_of(failed))
    if not kept:
        raise NoGroupLeftError(
            f"none of {len(groups)} groups has {needed} trajectories that ended well "
            f"({len(failed)} of {len(trajectories)} failed): " + "; ".join(causes)
        )
    compared = trajectory_advantages(trajectories, norm_by_std=norm_by_std)
    members = [(t, a) for t, a in zip(trajectories, compared, strict=True) if a is not None]
    sequences = tuple(
        _sequence(sample, advantage, number if len(trajectory.samples) > 1 else None, version)
        for number, (trajectory, advantage) in enumerate(members)
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


def trajectory_advantages(
    trajectories: Sequence[Trajectory], *, norm_by_std: bool
) -> list[float | None]:
    """Returns the advantage of each trajectory; None where it is not trained on.

    Args:
        trajectories: As for `make_batch`.
        norm_by_std: See `group_advantages`.
    """
    groups = _groups(trajectories)
    needed = _survivors_needed(groups)
    advantages: list[float | None] = []
    for group in groups:
        rewards = [_reward(t) for t in group if t.error is None]
        compared = group_advantages(rewards, [0] * len(rewards), norm_by_std=norm_by_std)
        left = iter(compared if len(rewards) >= needed else [])
        advantages += [None if t.error is not None else next(left, None) for t in group]
    return advantages


def _groups(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    grouped = itertools.groupby(trajectories, key=lambda t: t.task.task_id)
    return [list(members) for _, members in grouped]


def _survivors_needed(groups: Sequence[Sequence[Trajectory]]) -> int:
    return 2 if any(len(group) > 1 for group in groups) else 1


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
    """Returns a flag per token, or None if no token is stale.

    Adjacent sampled spans are one completion that continued through a weight update: its tokens
    after the update still depend on what older weights sampled.
    """
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
