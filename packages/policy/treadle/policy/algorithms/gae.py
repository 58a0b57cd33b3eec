"""Generalized advantage estimation, for a policy with a critic.

Shape suffixes: S samples, T tokens of all samples, sampled and observed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from treadle.policy.algorithms.advantages import Floats, Outcomes, PerToken, whitened

__all__ = ["gae", "whitened_gae"]


def whitened_gae(outcomes: Outcomes, *, gamma: float, lam: float) -> PerToken:
    """GAE of each sampled token, whitened over all sampled tokens of the step; returns are not.

    Each sample ends with the trajectory's reward, and has no other but what its tokens are charged.
    Groups are not compared.
    Whitened is (A - mean) / sqrt(variance + 1e-8), as in verl's `compute_gae_advantage_return`.

    Raises:
        ValueError: There are no values.
    """
    if outcomes.values_T is None:
        raise ValueError("gae needs the values of a critic")
    tokens_S = outcomes.tokens_S
    rewards_T = outcomes.rewards_T
    if rewards_T is None:
        ends_S = np.cumsum(tokens_S)[tokens_S > 0] - 1
        rewards_T = np.zeros(len(outcomes.values_T))
        rewards_T[ends_S] = outcomes.rewards_N[outcomes.trajectories_S[tokens_S > 0]]
    every_T = np.ones(len(rewards_T), bool)
    advantages_T, returns_T = gae(
        rewards_T, outcomes.values_T, every_T, tokens_S, gamma=gamma, lam=lam
    )
    ones_T = np.ones(len(rewards_T), np.int64)
    return PerToken(whitened(advantages_T, ones_T), returns_T)


def gae(
    rewards_T: Floats,
    values_T: Floats,
    mask_T: npt.NDArray[np.bool_],
    lengths_S: npt.NDArray[np.int64],
    *,
    gamma: float,
    lam: float,
) -> tuple[Floats, Floats]:
    """Returns the advantage and the return of every token, 0 where it was observed.

    Schulman et al. (arXiv:1506.02438), equation 16, computed backwards: with the next sampled token
    t' of the same sample, delta_t = r_t + gamma V_t' - V_t and A_t = delta_t + gamma lam A_t'. The
    last sampled token of a sample has nothing after it, V = A = 0. The return is A_t + V_t, the
    target of the critic.

    Observed tokens (tool results, replies of a simulated user) are skipped, as in verl's
    `compute_gae_advantage_return`: the policy does not choose them, so they neither discount nor
    have a value. A reward on one is not read; the reward of a trajectory belongs on the last
    sampled token of each of its samples.

    Time is linear in the tokens. Nothing is padded: beside inputs and outputs there are three
    numbers per sampled token.

    Args:
        values_T: The critic's value of each token's state.
        lengths_S: Number of tokens of each sample.
        lam: Weight of later temporal differences; 1 is the return minus the value.

    Raises:
        ValueError: The lengths do not add up to the tokens.
    """
    if not int(lengths_S.sum()) == len(rewards_T) == len(values_T) == len(mask_T):
        raise ValueError(
            f"samples of {int(lengths_S.sum())} tokens have {len(rewards_T)} rewards, "
            f"{len(values_T)} values and {len(mask_T)} flags"
        )
    owners_T = np.repeat(np.arange(len(lengths_S)), lengths_S)
    counts_S = np.bincount(owners_T[mask_T], minlength=len(lengths_S))
    rewards, values = rewards_T[mask_T], values_T[mask_T]
    ends_S = np.cumsum(counts_S)
    # All samples at once, from their ends; the longest come first, so those left are a prefix.
    order_S = np.argsort(-counts_S, kind="stable")
    left = np.searchsorted(-counts_S[order_S], -np.arange(counts_S.max(initial=0)))
    advantages = np.zeros(len(rewards))
    next_value, next_advantage = np.zeros(len(counts_S)), np.zeros(len(counts_S))
    for back, count in enumerate(left):
        at = ends_S[order_S[:count]] - 1 - back
        delta = rewards[at] + gamma * next_value[:count] - values[at]
        advantages[at] = next_advantage[:count] = delta + gamma * lam * next_advantage[:count]
        next_value[:count] = values[at]
    advantages_T, returns_T = np.zeros(len(rewards_T)), np.zeros(len(rewards_T))
    advantages_T[mask_T] = advantages
    returns_T[mask_T] = advantages + values
    return advantages_T, returns_T
