"""Shapes the rewards of training: what is added to the score of a trajectory before it is compared.

Invariant: validation is never shaped, so that its numbers stay comparable.
"""

from dataclasses import replace

from treadle.agent_loop import Trajectory
from treadle.tracing import Metric
from treadle.trainer.algorithms.overlong import overlong_penalty
from treadle.trainer.config.schema import Config
from treadle.trainer.report.rollout import accuracy, reported_accuracy

__all__ = ["shaped"]


def shaped(trajectory: Trajectory, config: Config) -> Trajectory:
    """Returns the trajectory with its penalty for length, if the configuration asks for one.

    The length is that of its longest sample, tool results included, as
    `rollout.response_length` counts. Whether the answer was right stays known.
    """
    factor = config.reward.overlong_penalty
    if not factor or trajectory.reward is None:
        return trajectory
    penalty = overlong_penalty(
        max(len(sample.response_ids) for sample in trajectory.samples),
        max_tokens=config.rollout.response_length,
        buffer=config.overlong_buffer,
        factor=factor,
    )
    metrics = [Metric("reward/overlong_penalty", penalty)]
    right = accuracy(trajectory)
    if right is not None and reported_accuracy(trajectory) is None:  # the penalty would hide it
        metrics.append(Metric("reward/accuracy", right))
    return replace(
        trajectory,
        reward=trajectory.reward + penalty,
        metrics=(*trajectory.metrics, *metrics),
    )
