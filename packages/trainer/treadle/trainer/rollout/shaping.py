"""Shapes the rewards of training: what is added to the score of a trajectory before it is compared.

Invariant: validation is never shaped, so that its numbers stay comparable.
"""

from collections.abc import Sequence
from dataclasses import replace

from treadle.agent_loop import Tokens, Trajectory
from treadle.policy.algorithms.overlong import overlong_penalty
from treadle.tracing import Metric
from treadle.trainer.config.schema import Config
from treadle.trainer.report.rollout import accuracy, reported_accuracy

__all__ = ["shaped"]


def shaped(trajectory: Trajectory, config: Config) -> Trajectory:
    """Returns the trajectory with its penalty for length, if the configuration sets one.

    The length is that of its longest sample, tool results included, as in
    `rollout.response_length`; players with rewards of their own are penalized by their own longest
    sample. The accuracy is kept as a metric if the penalty would hide it.
    """
    factor = config.reward.overlong_penalty
    if not factor or trajectory.reward is None:
        return trajectory

    def penalty_of(samples: Sequence[Tokens]) -> float:
        return overlong_penalty(
            max(len(sample.response_ids) for sample in samples),
            max_tokens=config.rollout.response_length,
            buffer=config.overlong_buffer,
            factor=factor,
        )

    penalty = penalty_of(trajectory.samples)
    by_player: dict[str, list[Tokens]] = {}
    for sample, given in zip(trajectory.samples, trajectory.sample_rewards, strict=False):
        by_player.setdefault(given.player, []).append(sample)
    metrics = [Metric("reward/overlong_penalty", penalty)]
    right = accuracy(trajectory)
    if right is not None and reported_accuracy(trajectory) is None:  # the penalty would hide it
        metrics.append(Metric("reward/accuracy", right))
    return trajectory.replaced(
        reward=trajectory.reward + penalty,
        sample_rewards=tuple(
            replace(given, value=given.value + penalty_of(by_player[given.player]))
            for given in trajectory.sample_rewards
        ),
        metrics=(*trajectory.metrics, *metrics),
    )
