"""Group-relative advantages: a trajectory's reward compared with the rewards of its group.

Pure functions of numbers, one per trajectory; without tensors, so that the driver needs no torch.

Shape suffix: N trajectories.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Final

STD_EPSILON: Final = 1e-6


def group_advantages(
    rewards_N: Sequence[float], groups_N: Sequence[Hashable], *, norm_by_std: bool = True
) -> list[float]:
    """Returns (reward - group mean) / (group standard deviation + 1e-6) for each trajectory.

    DeepSeekMath (arXiv:2402.03300), section 4.1.2, outcome supervision. The standard deviation is
    the unbiased one (n - 1), as in verl's `compute_grpo_outcome_advantage`. For a
    group of one, the mean is taken as 0 and the deviation as 1.

    Args:
        rewards_N: Outcome reward per trajectory.
        groups_N: Group of each trajectory; members need not be adjacent.
        norm_by_std: False leaves out the division: Dr. GRPO (arXiv:2503.20783), equation 3.

    Raises:
        ValueError: Lengths differ, or a reward is not finite.
    """
    members: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, (reward, group) in enumerate(zip(rewards_N, groups_N, strict=True)):
        if not math.isfinite(reward):
            raise ValueError(f"reward {index} of group {group!r} is {reward}; it must be finite")
        members[group].append(index)
    advantages = [0.0] * len(rewards_N)
    for indices in members.values():
        mean, std = _mean_and_std([rewards_N[i] for i in indices])
        for i in indices:
            centred = rewards_N[i] - mean
            advantages[i] = centred / (std + STD_EPSILON) if norm_by_std else centred
    return advantages


def _mean_and_std(rewards: Sequence[float]) -> tuple[float, float]:
    if len(rewards) == 1:
        return 0.0, 1.0
    if min(rewards) == max(rewards):
        return rewards[0], 0.0  # exactly: a mean that is off in the last bit would leave a gradient
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)
    return mean, math.sqrt(variance)
