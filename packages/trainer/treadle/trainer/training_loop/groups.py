"""Groups: makes sequences to train on of the trajectories of each row.

Survivor rule: a trajectory that failed is never trained on, and its group continues without it. A
group of which too few are left is dropped: an estimator that compares needs two of a row that has
more than one, ReMax the row's greedy trajectory, the others one. All losses are counted. A step
without any group left cannot be trained on.

A trajectory counts once in its group, whatever its number of samples. Each sample becomes a
sequence with the trajectory's advantage; together they count as one in the loss
(`batch.token_weights`). A sample without sampled tokens becomes no sequence.

Where players have their own rewards (`Trajectory.sample_rewards`), as in self-play, each player
of a trajectory is a member: its reward is compared with the rewards of the same player in the row's
other trajectories, so what one player wins is no baseline of the other. Where an estimator
compares, a player that only one surviving trajectory has gets advantage 0. In the loss, the samples
of all players still count as one trajectory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from treadle.agent_loop import (
    BoolArray,
    FloatArray,
    Image,
    Tokens,
    Trajectory,
    TrajectoryTimeoutError,
)
from treadle.policy.algorithms.advantages import Floats, Outcomes, PerToken, without_noise
from treadle.policy.algorithms.estimators import FoundEstimator
from treadle.policy.client.batch import of_loss_tokens
from treadle.policy.client.types import TrainSequence
from treadle.policy.v1 import training_service_pb2 as pb
from treadle.trainer.report.failures import causes as causes_of

__all__ = [
    "Group",
    "NoGroupLeftError",
    "StepBatch",
    "Survivors",
    "groups_of",
    "is_trainable",
    "make_batch",
    "survivors_of",
]


class NoGroupLeftError(RuntimeError):
    """No group of a step can be trained on; the message describes how the trajectories ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The trajectories of one row.

    Attributes:
        trajectories: All of them, also those that failed.
        greedy: Reward of the row's greedy trajectory; None: it failed, or none was sampled.
    """

    trajectories: tuple[Trajectory, ...]
    greedy: float | None = None

    @property
    def survivors(self) -> tuple[Trajectory, ...]:
        """The trajectories that ended well."""
        return tuple(t for t in self.trajectories if t.error is None)

    @property
    def players_differ(self) -> bool:
        """Whether some player's rewards differ among the survivors."""
        rewards: dict[str, list[float]] = {}
        for member in _members_of(self.survivors):
            rewards.setdefault(member.player, []).append(member.reward)
        return any(len(set(without_noise(values))) > 1 for values in rewards.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The sequences that a step trains on, with the counts of what was left out.

    Attributes:
        sequences: Members of the surviving groups, group by group.
        members: The trajectories that are trained on; of those with several players, the sampled
            tokens of all have one entry in `advantages`.
        advantages: One per member: the mean over its sampled tokens.
        num_groups: Number of groups before any was dropped.
        num_dropped_groups: Number of groups left out.
        num_failed: Number of trajectories that failed.
        num_incomplete_groups: Number of groups trained on without some of their trajectories.
        num_stragglers: Number of trajectories that failed because they passed their deadline.
        num_groups_with_signal: Number of groups whose rewards differ. Estimators that compare
            within the group alone give all others advantage 0, if the reward has no KL penalty.
        causes: One line per kind of failure, with its count.
        critic: Metrics of the critic's values; empty without a critic.
    """

    sequences: tuple[TrainSequence, ...]
    members: tuple[Trajectory, ...]
    advantages: tuple[float, ...]
    num_groups: int
    num_dropped_groups: int
    num_failed: int
    num_incomplete_groups: int
    num_stragglers: int
    num_groups_with_signal: int
    causes: tuple[str, ...]
    critic: Mapping[str, float] = field(default_factory=dict)

    def advantages_of(self, trajectories: Sequence[Trajectory]) -> list[float | None]:
        """Returns the advantage of each trajectory; None where it is not trained on."""
        known = dict(zip(map(id, self.members), self.advantages, strict=True))
        return [known.get(id(trajectory)) for trajectory in trajectories]

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
            **self.critic,
        }


def groups_of(
    trajectories: Sequence[Trajectory], greedy: Mapping[str, float] | None = None
) -> list[Group]:
    """Returns the groups of trajectories that are in the order of their tasks.

    Args:
        trajectories: Members of a row are adjacent.
        greedy: Reward of the greedy trajectory by the id of the row's tasks.
    """
    rewards = greedy or {}
    grouped = itertools.groupby(trajectories, key=lambda t: t.task.task_id)
    return [
        Group(trajectories=tuple(members), greedy=rewards.get(task_id))
        for task_id, members in grouped
    ]


def is_trainable(group: Group, estimator: FoundEstimator) -> bool:
    """Returns whether failures have left enough of a group to train on."""
    if estimator.needs_greedy and group.greedy is None:
        return False
    return len(group.survivors) >= _survivors_needed(group, estimator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivors:
    """The groups and sequences that a step trains on, before they have advantages.

    Attributes:
        groups: All groups of the step.
        sequences: Members of `kept`; their advantages are 0.
    """

    groups: tuple[Group, ...]
    kept: tuple[Group, ...]
    sequences: tuple[TrainSequence, ...]
    causes: tuple[str, ...]

    def with_logprobs(self, measured: pb.MeasureReferenceResponse) -> Survivors:
        """Returns them with the log-probabilities that were measured for the update."""
        sequences = self.sequences
        if measured.HasField("old_logprobs"):
            old = of_loss_tokens(sequences, measured.old_logprobs)
            sequences = tuple(
                replace(s, old_logprobs=each) for s, each in zip(sequences, old, strict=True)
            )
        found = replace(self, sequences=sequences)
        if measured.HasField("ref_logprobs"):
            found = found.with_reference(of_loss_tokens(sequences, measured.ref_logprobs))
        return found

    def with_reference(self, logprobs: Sequence[FloatArray]) -> Survivors:
        """Returns them with the reference's log-probabilities, [L] per sequence."""
        sequences = tuple(
            replace(s, ref_logprobs=each) for s, each in zip(self.sequences, logprobs, strict=True)
        )
        return replace(self, sequences=sequences)

    def with_values(self, values: Sequence[FloatArray]) -> Survivors:
        """Returns them with a critic's values, [L] per sequence."""
        sequences = tuple(
            replace(s, values=each) for s, each in zip(self.sequences, values, strict=True)
        )
        return replace(self, sequences=sequences)

    def batch(
        self, estimator: FoundEstimator, *, charges: Sequence[Floats] | None = None
    ) -> StepBatch:
        """Returns the batch with the advantages of an estimator.

        Args:
            estimator: Makes advantages of the outcomes.
            charges: [L] of each sequence: what to subtract from the reward at each loss token.

        Raises:
            AdvantageError: The estimator failed.
            ValueError: The estimator cannot be used for these rewards.
        """
        of_tokens = None if charges is None else _of_loss_tokens(self.sequences, charges)
        values = _values(self.sequences) if estimator.needs_values else None
        members = _members(self.kept)
        outcomes = _outcomes(self.kept, of_tokens, values)
        found = estimator(outcomes)
        if not isinstance(found, PerToken) and estimator.compares:
            found = np.where(_is_alone(self.kept), 0.0, found)
        sequences, advantages = _with_advantages(self.sequences, members, found)
        failed = [t for group in self.groups for t in group.trajectories if t.error is not None]
        return StepBatch(
            sequences=tuple(sequences),
            members=tuple(members),
            advantages=tuple(advantages),
            num_groups=len(self.groups),
            num_dropped_groups=len(self.groups) - len(self.kept),
            num_failed=len(failed),
            num_incomplete_groups=sum(len(g.survivors) < len(g.trajectories) for g in self.kept),
            num_stragglers=sum(isinstance(t.error, TrajectoryTimeoutError) for t in failed),
            num_groups_with_signal=sum(g.players_differ for g in self.kept),
            causes=self.causes,
            critic=_critic_metrics(values, found),
        )


def make_batch(groups: Sequence[Group], estimator: FoundEstimator, *, version: int) -> StepBatch:
    """Returns the batch of a step; see `survivors_of` and `Survivors.batch`."""
    return survivors_of(groups, estimator, version=version).batch(estimator)


def survivors_of(groups: Sequence[Group], estimator: FoundEstimator, *, version: int) -> Survivors:
    """Returns what a step trains on, without advantages.

    Args:
        estimator: Decides how many survivors a group needs.
        version: Version of the policy's weights; tokens of older versions are marked stale.

    Raises:
        NoGroupLeftError: No group has enough survivors.
    """
    kept = [group for group in groups if is_trainable(group, estimator)]
    every = [trajectory for group in groups for trajectory in group.trajectories]
    failed = [t for t in every if t.error is not None]
    causes = tuple(causes_of(failed))
    if not kept:
        needed = max((_survivors_needed(group, estimator) for group in groups), default=1)
        of_greedy = " and a greedy one" if estimator.needs_greedy else ""
        raise NoGroupLeftError(
            f"none of {len(groups)} groups has {needed} trajectories{of_greedy} that ended well "
            f"({len(failed)} of {len(every)} failed): " + "; ".join(causes)
        )
    members = _members(kept)
    shared: dict[Image, Image] = {}
    sequences = tuple(
        _sequence(sample, number if len(trajectory.samples) > 1 else None, version, shared)
        for number, trajectory in enumerate(members)
        for sample in trajectory.samples
        if sample.num_sampled_tokens
    )
    if not sequences:
        raise NoGroupLeftError(
            f"none of the {len(members)} trajectories that ended well has a sampled token"
        )
    return Survivors(groups=tuple(groups), kept=tuple(kept), sequences=sequences, causes=causes)


def _members(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.survivors]


def _of_loss_tokens(
    sequences: Sequence[TrainSequence], values: Sequence[FloatArray] | Sequence[Floats]
) -> Floats:
    return np.concatenate(
        [
            np.asarray(each, dtype=np.float64)[sequence.loss_positions]
            for sequence, each in zip(sequences, values, strict=True)
        ]
    )


def _values(sequences: Sequence[TrainSequence]) -> Floats:
    given = [sequence.values for sequence in sequences if sequence.values is not None]
    assert len(given) == len(sequences), "with_values comes first"
    return _of_loss_tokens(sequences, given)


def _critic_metrics(values: Floats | None, found: Floats | PerToken) -> Mapping[str, float]:
    """Returns metrics of how well the critic predicted the returns, before its update."""
    if values is None or not isinstance(found, PerToken) or found.returns_T is None:
        return {}
    values_T, returns_T = values, found.returns_T
    spread = float(returns_T.var())
    metrics = {
        "critic/values_mean": float(values_T.mean()),
        "critic/returns_mean": float(returns_T.mean()),
    }
    if spread > 0:  # else there is nothing to explain
        metrics["critic/vf_explained_var"] = 1.0 - float((returns_T - values_T).var()) / spread
    return metrics


def _outcomes(groups: Sequence[Group], charges: Floats | None, values: Floats | None) -> Outcomes:
    members = [
        (number, member, group.greedy)
        for number, group in enumerate(groups)
        for member in _members_of(group.survivors)
    ]
    greedy = [each for _, _, each in members if each is not None]
    if greedy and any(member.player for _, member, _ in members):
        raise ValueError(
            "the greedy trajectory's reward is one number, and trajectories have a reward for each "
            "player: use an estimator that compares within groups, such as grpo"
        )
    return Outcomes.of(
        [member.reward for _, member, _ in members],
        [(number, member.player) for number, member, _ in members],
        tokens=[[s.num_sampled_tokens for s in member.samples] for _, member, _ in members],
        greedy=greedy if len(greedy) == len(members) else None,
        charges=charges,
        values=values,
    )


def _with_advantages(
    sequences: Sequence[TrainSequence], members: Sequence[Trajectory], found: Floats | PerToken
) -> tuple[list[TrainSequence], list[float]]:
    """Returns the sequences with advantages, and the mean advantage of each trajectory."""
    per_token = found.values_T if isinstance(found, PerToken) else None
    returns = found.returns_T if isinstance(found, PerToken) else None
    per_member = iter(() if isinstance(found, PerToken) else found.tolist())
    per_trajectory: list[float] = []
    unchanged = iter(sequences)
    done: list[TrainSequence] = []
    begin = 0
    for trajectory in members:
        first, total, one = begin, 0.0, 0.0
        for member in _members_of([trajectory]):
            if per_token is None:
                one = next(per_member)
            for sample in member.samples:
                count = sample.num_sampled_tokens
                if count:
                    sequence = next(unchanged)
                    values: float | FloatArray = one
                    total += one * count
                    if per_token is not None:
                        values = sequence.aligned(per_token[begin : begin + count])
                    sequence = replace(sequence, advantages=values)
                    if returns is not None:
                        own = sequence.aligned(returns[begin : begin + count])
                        sequence = replace(sequence, returns=own)
                    done.append(sequence)
                begin += count
        if per_token is not None:
            total = math.fsum(per_token[first:begin].tolist())
        if trajectory.sample_rewards or per_token is not None:
            one = total / max(1, begin - first)
        per_trajectory.append(one)
    return done, per_trajectory


def _survivors_needed(group: Group, estimator: FoundEstimator) -> int:
    return 2 if estimator.compares and len(group.trajectories) > 1 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A member of a group, which is compared: a trajectory, or one player of it.

    Attributes:
        player: "" of a trajectory whose samples share its reward.
        samples: Adjacent samples of the trajectory.
    """

    player: str
    reward: float
    samples: tuple[Tokens, ...]


def _members_of(trajectories: Iterable[Trajectory]) -> Iterator[_Member]:
    """Yields the members of trajectories that ended well, in the order of their samples."""
    for trajectory in trajectories:
        if not trajectory.sample_rewards:
            reward = _reward(trajectory)
            yield _Member(player="", reward=reward, samples=trajectory.samples)
            continue
        pairs = zip(trajectory.sample_rewards, trajectory.samples, strict=True)
        for given, samples in itertools.groupby(pairs, key=lambda pair: pair[0]):
            yield _Member(
                player=given.player,
                reward=given.value,
                samples=tuple(sample for _, sample in samples),
            )


def _is_alone(groups: Sequence[Group]) -> list[bool]:
    """Returns of each member whether it is a player that no other survivor of its group has."""
    alone: list[bool] = []
    for group in groups:
        players = [member.player for member in _members_of(group.survivors)]
        several = len(group.trajectories) > 1
        alone += [several and player != "" and players.count(player) == 1 for player in players]
    return alone


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None, "every trajectory that ended well has been scored"
    return trajectory.reward


def _sequence(
    tokens: Tokens, trajectory: int | None, version: int, shared: dict[Image, Image]
) -> TrainSequence:
    """Returns a sample as a sequence; equal images become the one object in `shared`."""
    return TrainSequence(
        ids=tokens.ids,
        loss_mask=tokens.loss_mask,
        rollout_logprobs=tokens.logprobs,
        advantages=0.0,
        trajectory=trajectory,
        stale=_stale(tokens, version),
        routed_experts=tokens.routed_experts,
        sampling_masks=tokens.sampling_masks,
        images=tuple(
            replace(placed, image=shared.setdefault(placed.image, placed.image))
            for placed in tokens.images
        ),
    )


def _stale(tokens: Tokens, version: int) -> BoolArray | None:
    """Returns a flag per token, or None if no token is stale.

    Adjacent sampled spans are one completion that continued through a weight update: its tokens
    after the update still depend on what older weights sampled.
    """
    stale = bytearray(len(tokens.ids))
    last_stop = -1
    for _, start, stop, sampled_by in tokens.runs():
        if sampled_by is None:
            continue
        older = sampled_by < version
        continues = start == last_stop and bool(stale[last_stop - 1])
        stale[start:stop] = bytes([older or continues]) * (stop - start)
        last_stop = stop
    return BoolArray.of_buffer(bytes(stale)) if any(stale) else None
