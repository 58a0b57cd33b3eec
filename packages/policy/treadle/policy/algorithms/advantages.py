"""Advantage estimators: the outcomes of a step's trajectories to the advantage of each.

Pure functions over flat arrays, in float64 and without torch, so that the driver computes them.
Each takes `Outcomes` and returns one number per trajectory, which all of its sampled tokens get, or
`PerToken`. `algorithms/estimators.py` finds them by name; a user's own function has the same form.

The rules that all of them keep:

- A trajectory counts once, whatever its number of samples. Its samples share its reward.
- Observed tokens (prompts, tool results, replies of a simulated user) have no advantage. Where a
  formula counts tokens, it counts sampled ones.
- The order of trajectories and of groups does not matter. Sums within a group are exact
  (`math.fsum`), so that there it does not change a single bit.
- Where rewards are compared and all of them are equal, the advantage is exactly 0: a mean that is
  off in its last bit would leave a gradient.

Time is linear in the trajectories. Memory is some numbers per trajectory and per sample; only a
discount below 1 and charges of tokens need numbers per token.

Shape suffixes: N trajectories, S samples, T sampled tokens of all samples.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

STD_EPSILON: Final = 1e-6
VARIANCE_EPSILON: Final = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """The rewards of a step's trajectories that ended well, with all that an estimator may use.

    Attributes:
        groups_N: Number of each trajectory's group, from 0.
        trajectories_S: Number of each sample's trajectory, ascending.
        greedy_N: Reward of the greedy trajectory of the same row; None if none was sampled.
        rewards_T: Reward of each sampled token, where tokens are charged, as for their KL: minus
            the charge, and on the last token of each sample plus the trajectory's reward. None:
            nothing is charged. `rewards_N` are less the sum of a trajectory's charges.
        values_T: The critic's value of the state before each sampled token; None without a critic.
    """

    rewards_N: Floats
    groups_N: Integers
    trajectories_S: Integers
    tokens_S: Integers
    greedy_N: Floats | None = None
    rewards_T: Floats | None = None
    values_T: Floats | None = None

    @classmethod
    def of(
        cls,
        rewards: Sequence[float],
        groups: Sequence[Hashable],
        *,
        tokens: Sequence[Sequence[int]] | None = None,
        greedy: Sequence[float] | None = None,
        charges: Sequence[float] | Floats | None = None,
        values: Sequence[float] | Floats | None = None,
    ) -> Outcomes:
        """Returns the arrays of lists with one entry per trajectory.

        Args:
            groups: Group of each trajectory, by any name; members need not be adjacent.
            tokens: Number of sampled tokens of each sample of each trajectory. None: one sample
                of one token each.
            charges: Subtracted at each sampled token, in the samples' order; None: nothing.

        Raises:
            ValueError: Lengths differ, or a reward is not finite.
        """
        numbers: dict[Hashable, int] = {}
        for reward, group in zip(rewards, groups, strict=True):
            if not math.isfinite(reward):
                raise ValueError(f"a reward of group {group!r} is {reward}; it must be finite")
            numbers.setdefault(group, len(numbers))
        of_samples = [[1]] * len(rewards) if tokens is None else tokens
        counts = [len(samples) for _, samples in zip(rewards, of_samples, strict=True)]
        outcomes = cls(
            rewards_N=np.array(rewards, np.float64),
            groups_N=np.array([numbers[group] for group in groups], np.int64),
            trajectories_S=np.repeat(np.arange(len(rewards)), counts),
            tokens_S=np.array([m for samples in of_samples for m in samples], np.int64),
            greedy_N=None if greedy is None else np.array(greedy, np.float64),
            values_T=None if values is None else np.array(values, np.float64),
        )
        return outcomes if charges is None else outcomes._charged(np.array(charges, np.float64))

    def _charged(self, charges_T: Floats) -> Outcomes:
        if len(charges_T) != (total := int(self.tokens_S.sum())):
            raise ValueError(f"there are {len(charges_T)} charges for {total} sampled tokens")
        of_samples = [math.fsum(each) for each in np.split(charges_T, np.cumsum(self.tokens_S))]
        sums_N = np.zeros(len(self.rewards_N))
        np.add.at(sums_N, self.trajectories_S, of_samples[:-1])
        rewards_T = -charges_T
        filled_S = self.tokens_S > 0
        last = (np.cumsum(self.tokens_S) - 1)[filled_S]
        rewards_T[last] += self.rewards_N[self.trajectories_S[filled_S]]
        return replace(self, rewards_N=self.rewards_N - sums_N, rewards_T=rewards_T)

    @property
    def tokens_N(self) -> Integers:
        """Number of sampled tokens of each trajectory, over its samples."""
        counts_N = np.zeros(len(self.rewards_N), np.int64)
        np.add.at(counts_N, self.trajectories_S, self.tokens_S)
        return counts_N

    def members(self) -> Iterator[Integers]:
        """Yields the indices of the trajectories of each group."""
        if not len(self.groups_N):
            return
        order_N = np.argsort(self.groups_N, kind="stable")
        yield from np.split(order_N, np.flatnonzero(np.diff(self.groups_N[order_N])) + 1)


@dataclass(frozen=True, slots=True)
class PerToken:
    """Advantages that differ within a trajectory: one per sampled token, in the samples' order.

    Attributes:
        returns_T: The critic's targets; None without a critic.
    """

    values_T: Floats
    returns_T: Floats | None = None


def grpo(outcomes: Outcomes, *, norm_by_std: bool) -> Floats:
    """GRPO: (reward - group mean) / (group standard deviation + 1e-6).

    DeepSeekMath (arXiv:2402.03300), section 4.1.2, outcome supervision. The standard deviation is
    the unbiased one (n - 1), as in verl's `compute_grpo_outcome_advantage`. For a group of one, the
    mean is taken as 0 and the deviation as 1.

    Args:
        norm_by_std: False leaves out the division: Dr. GRPO (arXiv:2503.20783), equation 3.
    """

    def of_group(rewards: list[float]) -> list[float]:
        mean = _mean_or_zero(rewards)
        centred = [reward - mean for reward in rewards]
        if not norm_by_std:
            return centred
        scale = _std(rewards) + STD_EPSILON
        return [each / scale for each in centred]

    return _in_groups(outcomes, of_group)


def dr_grpo(outcomes: Outcomes) -> Floats:
    """Dr. GRPO: reward - group mean (arXiv:2503.20783, equation 3); a group of one has mean 0."""
    return grpo(outcomes, norm_by_std=False)


def rloo(outcomes: Outcomes) -> Floats:
    """RLOO: the reward minus the mean of the n - 1 other rewards of the group.

    Ahmadian et al. (arXiv:2402.14740), section 2.2. It equals (reward - mean) n / (n - 1). A group
    of one keeps its reward.
    """

    def of_group(rewards: list[float]) -> list[float]:
        n = len(rewards)
        mean = _mean_or_zero(rewards)
        scale = n / (n - 1) if n > 1 else 1.0
        return [(reward - mean) * scale for reward in rewards]

    return _in_groups(outcomes, of_group)


def reinforce_plus_plus(outcomes: Outcomes, *, gamma: float) -> Floats | PerToken:
    """REINFORCE++: the discounted return of each sampled token, whitened over all of the step's.

    Hu et al. (arXiv:2501.03262), section 3. With k sampled tokens after it in its sample, a token's
    return is reward * gamma^k: observed tokens neither discount nor, as in verl, cut the return of
    what was sampled before them. Each sample ends with the trajectory's reward. Mean and unbiased
    variance are over tokens, so longer trajectories weigh more; whitened is
    (return - mean) / sqrt(variance + 1e-8). Groups are not compared. Where tokens are charged, the
    return of a token is the discounted sum of the rewards from it on, as in verl.

    Args:
        gamma: At 1 all tokens of a trajectory have one advantage, and no number per token is kept,
            unless tokens are charged.
    """
    if outcomes.rewards_T is not None:
        returns_T = _returns(outcomes.rewards_T, outcomes.tokens_S, gamma)
        return PerToken(whitened(returns_T, np.ones(len(returns_T), np.int64)))
    if gamma == 1.0:
        return whitened(outcomes.rewards_N, outcomes.tokens_N)
    starts_S = np.cumsum(outcomes.tokens_S) - outcomes.tokens_S
    after_T = np.repeat(starts_S + outcomes.tokens_S - 1, outcomes.tokens_S)
    after_T -= np.arange(len(after_T))
    rewards_T = np.repeat(outcomes.rewards_N[outcomes.trajectories_S], outcomes.tokens_S)
    return PerToken(whitened(rewards_T * gamma**after_T, np.ones(len(after_T), np.int64)))


def reinforce_plus_plus_baseline(outcomes: Outcomes) -> Floats:
    """REINFORCE++-baseline: reward - group mean, whitened over all sampled tokens of the step.

    Hu et al. (arXiv:2501.03262), section 3.3. A group of one has mean 0.
    """
    return whitened(grpo(outcomes, norm_by_std=False), outcomes.tokens_N)


def remax(outcomes: Outcomes) -> Floats:
    """ReMax: the reward minus that of the row's greedy trajectory.

    Li et al. (arXiv:2310.10505), algorithm 1. Groups are not compared.

    Raises:
        ValueError: No greedy trajectories were sampled.
    """
    if outcomes.greedy_N is None:
        raise ValueError("remax needs the reward of a greedy trajectory of each row")
    return outcomes.rewards_N - outcomes.greedy_N


def opo(outcomes: Outcomes) -> Floats:
    """OPO: the reward minus the mean of the group's rewards weighted by length.

    Hao et al. (arXiv:2505.23585), equation 8. The length of a trajectory is its number of sampled
    tokens. A group of one has baseline 0.
    """
    tokens_N = outcomes.tokens_N
    advantages_N = np.zeros(len(outcomes.rewards_N))
    for members in outcomes.members():
        rewards, lengths = outcomes.rewards_N[members].tolist(), tokens_N[members].tolist()
        baseline = 0.0
        if len(rewards) > 1:
            baseline = _weighted_mean(rewards, lengths)
        advantages_N[members] = [reward - baseline for reward in rewards]
    return advantages_N


def grpo_passk(outcomes: Outcomes, *, norm_by_std: bool) -> Floats:
    """Pass@k: only the best of a group has an advantage, its lead over the second best.

    Tang et al. (arXiv:2503.19595), as in verl's `compute_grpo_passk_outcome_advantage`:
    (best - second) / (group standard deviation + 1e-6). Where two are best, nothing has one.

    Args:
        outcomes: Outcomes of the step; groups of one have no second, and so no advantage.
        norm_by_std: False leaves out the division.
    """

    def of_group(rewards: list[float]) -> list[float]:
        if len(rewards) == 1:
            return [0.0]
        second, best = sorted(rewards)[-2:]
        lead = best - second
        if norm_by_std:
            lead /= _std(rewards) + STD_EPSILON
        return [lead if reward == best else 0.0 for reward in rewards]

    return _in_groups(outcomes, of_group)


def gpg(outcomes: Outcomes) -> Floats:
    """GPG: alpha (reward - group mean), alpha = trajectories / trajectories with a reward but 0.

    Chu et al. (arXiv:2504.02546), section 3.2, with verl's alpha (`compute_gpg_outcome_advantage`):
    the paper counts the trajectories of groups with signal instead. A group of one has mean 0.
    """
    alpha = len(outcomes.rewards_N) / max(1, int(np.count_nonzero(outcomes.rewards_N)))
    return grpo(outcomes, norm_by_std=False) * alpha


def maxrl(outcomes: Outcomes) -> Floats:
    """MaxRL: (reward - group mean) / (group mean + 1e-6), for rewards from 0.

    Tajwar et al. (arXiv:2602.02710), section 4: with rewards of 0 and 1 the mean estimates the
    success rate p, and the gradient is that of log p. A group of one has no advantage.

    Raises:
        ValueError: A reward is negative.
    """
    if (lowest := float(outcomes.rewards_N.min(initial=0.0))) < 0:
        raise ValueError(
            f"maxrl divides by the mean reward of a group, and a reward is {lowest:g}: use "
            "rewards from 0, or another algorithm.advantage"
        )

    def of_group(rewards: list[float]) -> list[float]:
        mean = _mean(rewards)
        return [(reward - mean) / (mean + STD_EPSILON) for reward in rewards]

    return _in_groups(outcomes, of_group)


def _in_groups(outcomes: Outcomes, of_group: Callable[[list[float]], list[float]]) -> Floats:
    advantages_N = np.zeros(len(outcomes.rewards_N))
    for members in outcomes.members():
        advantages_N[members] = of_group(without_noise(outcomes.rewards_N[members].tolist()))
    return advantages_N


def without_noise(rewards: Sequence[float]) -> list[float]:
    """Returns the rewards of a group, made equal where they differ only by rounding.

    Sums of a reward's parts in another order differ in the last bits: 0.1 + 0.2 is not 0.3. Values
    within a relative 1e-9 of each other are all replaced by the smallest of them.
    """
    known: list[float] = []
    for reward in sorted(rewards):
        if not known or not math.isclose(reward, known[-1], rel_tol=1e-9, abs_tol=1e-12):
            known.append(reward)
    return [known[bisect.bisect_right(known, reward) - 1] for reward in rewards]


def _returns(rewards_T: Floats, tokens_S: Integers, gamma: float) -> Floats:
    """Returns sum_k gamma^k reward_{t+k} of each token t, within its sample."""
    returns_T = rewards_T.tolist()
    stop = 0
    for count in tokens_S.tolist():
        start, stop = stop, stop + count
        for t in range(stop - 2, start - 1, -1):
            returns_T[t] += gamma * returns_T[t + 1]
    return np.array(returns_T)


def _mean(values: Sequence[float]) -> float:
    if min(values) == max(values):
        return values[0]
    return math.fsum(values) / len(values)


def _mean_or_zero(rewards: Sequence[float]) -> float:
    """Returns the mean of a group; 0 for a group of one, which would have no advantage."""
    return _mean(rewards) if len(rewards) > 1 else 0.0


def _std(rewards: Sequence[float]) -> float:
    """Returns the unbiased standard deviation of a group; 1 for a group of one."""
    if len(rewards) == 1:
        return 1.0
    mean = _mean(rewards)
    return math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Returns the weighted mean; the plain one if there is no weight."""
    if min(values) == max(values):
        return values[0]
    total = math.fsum(weights)
    if not total:
        return _mean(values)
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / total


def whitened(values: Floats, tokens: Integers) -> Floats:
    """Returns (value - mean) / sqrt(variance + 1e-8), each value counted `tokens` times.

    The variance is unbiased, and 0 for less than two tokens. verl's `masked_whiten`.
    """
    counted = values[tokens > 0]
    if not len(counted) or counted.min() == counted.max():
        return np.zeros(len(values))
    total = int(tokens.sum())
    mean = math.fsum(values * tokens) / total
    variance = math.fsum((values - mean) ** 2 * tokens) / (total - 1)
    result: Floats = (values - mean) / math.sqrt(variance + VARIANCE_EPSILON)
    return result
