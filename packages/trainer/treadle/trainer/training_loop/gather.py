"""Gathers the groups of a step: one batch of rows, or with dynamic sampling as many as it takes.

Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2) replaces groups without signal, and those of
which failures left too little, by those of the next rows of the data order, a batch of rows at a
time, up to a stated number of batches. Groups with signal beyond what the step needs are its
surplus, which the next step trains on first. It is for estimators that compare the trajectories of
a group (`preflight.process_checks`): with others, groups of equal rewards have advantages.

Invariants:

1. A step trains on at most `data.prompts_per_step` groups. Groups lost to failures leave their
   places empty: `survivors_of` drops them, and dynamic sampling gives their places to further rows.
   Where the batches of rows give too few groups with signal, groups without fill the places.
2. The surplus is less than one step, so no group is older than one step. Its tokens are stale.
3. The greedy trajectories, of an estimator that subtracts their reward, are no member of a group:
   nothing of them is trained on, and only the metrics `greedy/*` count them.
4. Resuming is exact. The number of the last batch of rows is a metric of the step, which its
   checkpoint has. A step that saves a checkpoint keeps no surplus, whether or not the run is
   interrupted after it; what it gives up is counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from treadle.agent_loop import AgentTask, Trajectory
from treadle.policy.algorithms.advantages import without_noise
from treadle.tracing import FinishedSpan
from treadle.trainer.report.failures import causes
from treadle.trainer.report.rollout import accuracy
from treadle.trainer.training_loop.context import TrainingContext
from treadle.trainer.training_loop.groups import Group, groups_of, is_trainable
from treadle.trainer.training_loop.run_record import Sampled

__all__ = ["StepGroups", "gather", "has_signal", "note_failures"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Greedy:
    """The rewards of those of one batch of rows.

    Attributes:
        rewards: By the id of the row's tasks; without those that failed.
    """

    rewards: Mapping[str, float]
    num_failed: int


@dataclass(slots=True)
class StepGroups:
    """The groups that were gathered for a step.

    Attributes:
        trajectories: Sampled in this step, in the order of their tasks.
    """

    groups: Sequence[Group] = ()
    trajectories: list[Trajectory] = field(default_factory=list)
    spans: list[FinishedSpan] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def sampled(self) -> Sampled:
        """The trajectories with what was traced."""
        return Sampled(trajectories=self.trajectories, spans=self.spans)


async def gather(context: TrainingContext, step: int, *, keep_surplus: bool) -> StepGroups:
    """Samples the groups of a step.

    Args:
        context: Its `surplus` and `batches` are read and replaced.
        keep_surplus: Whether what is left goes to the next step.

    Returns:
        The groups to train on. If all were lost to failures, they are returned anyway, so that
        `survivors_of` raises with the cause.

    Raises:
        OutageError: Something is down that the greedy trajectories need.
    """
    algorithm, wanted = context.config.algorithm, context.config.data.prompts_per_step
    found = StepGroups()
    greedy: list[_Greedy] = []
    if algorithm.dynamic_sampling is None:
        context.batches = step
        found.groups = await _sample_batch(context, step, step, found, greedy)
        found.metrics = _greedy_metrics(greedy)
        return found
    with_signal, without, lost = list(context.surplus), list[Group](), list[Group]()
    kept = len(with_signal)
    first = context.batches
    while len(with_signal) < wanted and context.batches - first < algorithm.max_generation_batches:
        context.batches += 1
        for group in await _sample_batch(context, step, context.batches, found, greedy):
            if not is_trainable(group, context.estimator):
                lost.append(group)
            elif has_signal(group, by=algorithm.dynamic_sampling):
                with_signal.append(group)
            else:
                without.append(group)
    missing = max(0, wanted - len(with_signal))
    filling, replaced = without[:missing], without[missing:]
    surplus = with_signal[wanted:]
    context.surplus = surplus if keep_surplus else []
    found.groups = [*with_signal[:wanted], *filling] or lost
    if missing:
        _note_missing(context, step, filling=len(filling), missing=missing)
    if found.groups is not lost:
        given_up = [] if keep_surplus else surplus
        note_failures(context, step, [*lost, *replaced, *given_up], num_lost=len(lost))
    found.metrics = _greedy_metrics(greedy) | {
        "data/batches": float(context.batches),
        "sampling/batches": float(context.batches - first),
        "sampling/groups_replaced": float(len(replaced)),
        "sampling/groups_failed": float(len(lost)),
        "sampling/groups_missing": float(missing),
        "sampling/surplus_used": float(kept),
        "sampling/surplus": float(len(context.surplus)),
        "sampling/surplus_given_up": float(len(surplus) - len(context.surplus)),
    }
    return found


def _note_missing(context: TrainingContext, step: int, *, filling: int, missing: int) -> None:
    wanted, empty = context.config.data.prompts_per_step, missing - filling
    says = [f"{filling} of {wanted} groups have no signal"] if filling else []
    says += [f"{empty} of {wanted} places are empty"] if empty else []
    limit = context.config.algorithm.max_generation_batches
    context.record.note(
        step,
        f"{' and '.join(says)} after algorithm.max_generation_batches={limit} batches of rows",
    )


def has_signal(group: Group, *, by: str) -> bool:
    """Returns whether the trajectories of a group that ended well differ.

    Args:
        by: "reward", or "accuracy" where every one of them has one. Players with rewards of their
            own differ by these.
    """
    survivors = group.survivors
    if any(t.sample_rewards for t in survivors):
        return group.players_differ
    values = [t.reward for t in survivors if t.reward is not None]
    if by == "accuracy":
        right = [value for t in survivors if (value := accuracy(t)) is not None]
        values = right if len(right) == len(survivors) else values
    return len(set(without_noise(values))) > 1


def note_failures(
    context: TrainingContext, step: int, groups: Sequence[Group], *, num_lost: int
) -> None:
    """Adds a note on failed trajectories in groups that are not trained on.

    Args:
        step: The step that the note belongs to.
        num_lost: Number of groups that are left out because of failures.
    """
    failed = [t for group in groups for t in group.trajectories if t.error is not None]
    if failed:
        text = (
            f"{len(failed)} trajectories failed in groups that are left out; "
            f"{num_lost} groups are left out because of them"
        )
        context.record.note(step, "\n  ".join([text, *causes(failed)]))


async def _sample_batch(
    context: TrainingContext, step: int, batch: int, found: StepGroups, greedy: list[_Greedy]
) -> list[Group]:
    tasks = context.train_tasks(batch)
    sampled = await context.sample("rollout", tasks, step=step)
    found.trajectories += sampled.trajectories
    found.spans += sampled.spans
    if context.estimator.needs_greedy:
        greedy.append(await _sample_greedy(context, tasks, step=step))
    return groups_of(sampled.trajectories, greedy[-1].rewards if greedy else {})


def _greedy_metrics(batches: Sequence[_Greedy]) -> dict[str, float]:
    """Returns their number, and their mean reward if there is one; nothing of no batches."""
    if not batches:
        return {}
    failed = sum(batch.num_failed for batch in batches)
    rewards = [reward for batch in batches for reward in batch.rewards.values()]
    metrics = {
        "greedy/num_trajectories": float(len(rewards) + failed),
        "greedy/num_failed": float(failed),
    }
    if rewards:
        metrics["greedy/reward"] = sum(rewards) / len(rewards)
    return metrics


async def _sample_greedy(
    context: TrainingContext, tasks: Sequence[AgentTask], *, step: int
) -> _Greedy:
    """Samples the row of each group of tasks once more, at temperature 0.

    Raises:
        OutageError: Something is down that the trajectories need.
    """
    rows = [
        replace(task, rollout_index=context.config.rollout.samples_per_prompt)
        for task in tasks
        if task.rollout_index == 0
    ]
    trajectories = (await context.sample("greedy", rows, step=step)).trajectories
    failed = [trajectory for trajectory in trajectories if trajectory.error is not None]
    if failed:
        text = f"{len(failed)} of {len(trajectories)} greedy trajectories failed"
        context.record.note(step, "\n  ".join([text, *causes(failed)]))
        context.rollout.check_outages(failed)
    return _Greedy(
        rewards={t.task.task_id: t.reward for t in trajectories if t.reward is not None},
        num_failed=len(failed),
    )
