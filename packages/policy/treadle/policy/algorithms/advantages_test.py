"""Advantages against their papers' formulas, computed here one sampled token at a time."""

import math
import statistics
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.policy.algorithms import advantages
from treadle.policy.algorithms.advantages import Outcomes, PerToken, without_noise
from treadle.policy.algorithms.estimators import NAMED, find_estimator
from treadle.policy.config.algorithm import AlgorithmConfig

WITHOUT_CRITIC = [name for name, each in NAMED.items() if not each.needs_values]
"""Those whose advantages follow from the rewards; `gae_test` has the other."""

few = settings(max_examples=15, deadline=None)
rewards = st.floats(-100.0, 100.0, allow_subnormal=False)


def estimate(name: str, outcomes: Outcomes, **settings: object) -> list[float]:
    config = AlgorithmConfig.model_validate({"advantage": name, **settings})
    found = find_estimator(config)(outcomes)
    values = found.values_T if isinstance(found, PerToken) else found
    return [float(value) for value in values]


@st.composite
def steps(draw: st.DrawFn) -> Outcomes:
    """A step of up to four groups of up to five trajectories, of up to two samples each."""
    groups = [g for g in range(draw(st.integers(1, 4))) for _ in range(draw(st.integers(1, 5)))]
    each = st.one_of(st.sampled_from([0.0, 0.0, 1.0, 0.5]), st.floats(0.0, 10.0, width=32))
    values = [draw(each) for _ in groups]
    samples = st.lists(st.integers(0, 6), min_size=1, max_size=2)
    return Outcomes.of(
        values,
        groups,
        tokens=[draw(samples) for _ in groups],
        greedy=[draw(st.sampled_from([0.0, 1.0])) for _ in groups],
    )


@pytest.mark.parametrize("name", ["grpo", "rloo", "grpo_passk", "maxrl"])
@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3, 0.3, 0.3], [0.3, 0.1 + 0.2, 0.3 - 1e-16]])
def test_rewards_that_rounding_alone_tells_apart_are_equal(name: str, rewards: list[float]) -> None:
    outcomes = Outcomes.of(rewards, [0] * len(rewards), tokens=[[1]] * len(rewards))
    assert not any(estimate(name, outcomes))


def test_a_difference_that_is_none_of_rounding_stays() -> None:
    assert without_noise([1.0, 1.0 + 1e-8, -1.0, 0.0, 1e-11]) == [1.0, 1.0 + 1e-8, -1.0, 0.0, 1e-11]


# The formulas, naively. `r` are the rewards of the group of trajectory i, which has the reward `x`;
# `m` are the sampled tokens of the group's trajectories.


def mean(r: list[float]) -> float:
    return sum(r) / len(r) if len(r) > 1 else 0.0


def grpo(x: float, r: list[float], m: list[int]) -> float:
    std = statistics.stdev(r) if len(r) > 1 else 1.0
    return (x - mean(r)) / (std + 1e-6)


def rloo(x: float, r: list[float], m: list[int]) -> float:
    others = list(r)
    others.remove(x)
    return x - sum(others) / len(others) if others else x


def opo(x: float, r: list[float], m: list[int]) -> float:
    if len(r) == 1:
        return x
    tokens = [value for value, count in zip(r, m, strict=True) for _ in range(count)]
    return x - (sum(tokens) / len(tokens) if tokens else sum(r) / len(r))


def passk(x: float, r: list[float], m: list[int]) -> float:
    if len(r) == 1 or x < max(r):
        return 0.0
    return (x - sorted(r)[-2]) / (statistics.stdev(r) + 1e-6)


def maxrl(x: float, r: list[float], m: list[int]) -> float:
    average = sum(r) / len(r)
    return (x - average) / (average + 1e-6)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("grpo", grpo),
        ("dr_grpo", lambda x, r, m: x - mean(r)),
        ("rloo", rloo),
        ("opo", opo),
        ("grpo_passk", passk),
        ("maxrl", maxrl),
    ],
)
@few
@given(outcomes=steps())
def test_within_groups(
    name: str, formula: Callable[[float, list[float], list[int]], float], outcomes: Outcomes
) -> None:
    got = estimate(name, outcomes)
    for i, (x, group) in enumerate(zip(outcomes.rewards_N, outcomes.groups_N, strict=True)):
        inside = outcomes.groups_N == group
        r, m = outcomes.rewards_N[inside].tolist(), outcomes.tokens_N[inside].tolist()
        assert got[i] == pytest.approx(formula(float(x), r, m), rel=1e-6, abs=1e-6)


def whitened(tokens: list[float]) -> list[float]:
    if len(tokens) < 2:
        return [0.0] * len(tokens)
    average, variance = sum(tokens) / len(tokens), statistics.variance(tokens)
    return [(token - average) / math.sqrt(variance + 1e-8) for token in tokens]


def expanded(outcomes: Outcomes, values: list[float]) -> list[float]:
    """One number per sampled token, of one per trajectory."""
    places = zip(outcomes.trajectories_S, outcomes.tokens_S, strict=True)
    return [values[i] for i, count in places for _ in range(count)]


@few
@given(outcomes=steps(), gamma=st.sampled_from([1.0, 0.99, 0.5]))
def test_reinforce_plus_plus_whitens_the_returns_of_all_sampled_tokens(
    outcomes: Outcomes, gamma: float
) -> None:
    places = zip(outcomes.trajectories_S, outcomes.tokens_S, strict=True)
    returns = [
        float(outcomes.rewards_N[i]) * gamma ** (count - 1 - t)
        for i, count in places
        for t in range(count)
    ]
    got = estimate("reinforce_plus_plus", outcomes, gamma=gamma)
    tokens = expanded(outcomes, got) if gamma == 1 else got
    assert tokens == pytest.approx(whitened(returns), rel=1e-4, abs=1e-4)


@few
@given(outcomes=steps())
def test_its_baseline_form_whitens_what_the_group_leaves(outcomes: Outcomes) -> None:
    centred = [
        float(x) - mean(outcomes.rewards_N[outcomes.groups_N == group].tolist())
        for x, group in zip(outcomes.rewards_N, outcomes.groups_N, strict=True)
    ]
    got = expanded(outcomes, estimate("reinforce_plus_plus_baseline", outcomes))
    assert got == pytest.approx(whitened(expanded(outcomes, centred)), rel=1e-3, abs=1e-3)


# By hand, from the formulas: groups a = (3, 1, 2), b = (0, 0), c = (1,); 2, 1, 1, 4, 4, 2 tokens.
HAND = Outcomes.of(
    [3.0, 1.0, 2.0, 0.0, 0.0, 1.0],
    "aaabbc",
    tokens=[[1, 1], [1], [1], [4], [4], [2]],
    greedy=[2.0, 2.0, 2.0, 0.0, 0.0, 0.5],
)


BY_HAND = [
    ("dr_grpo", [1, -1, 0, 0, 0, 1]),
    ("grpo", [1, -1, 0, 0, 0, 1]),  # the deviation of a is 1
    ("rloo", [1.5, -1.5, 0, 0, 0, 1]),  # 3 - (1 + 2) / 2
    ("opo", [0.75, -1.25, -0.25, 0, 0, 1]),  # (2 * 3 + 1 + 2) / 4 = 2.25
    ("grpo_passk", [1, 0, 0, 0, 0, 0]),
    ("gpg", [1.5, -1.5, 0, 0, 0, 1.5]),  # 6 trajectories / 4 with a reward
    ("maxrl", [0.5, -0.5, 0, 0, 0, 0]),
    ("remax", [1, -1, 0, 0, 0, 0.5]),
    # Tokens 3 3 1 2 0 (8 times) 1 1: mean 11/14, squares 25 - 121/14, over 13.
    (
        "reinforce_plus_plus",
        [(x - 11 / 14) / math.sqrt((25 - 121 / 14) / 13) for x in (3, 1, 2, 0, 0, 1)],
    ),
    # Tokens 1 1 -1 0 0 (8 times) 1 1: mean 3/14, squares 5 - 9/14, over 13.
    (
        "reinforce_plus_plus_baseline",
        [(x - 3 / 14) / math.sqrt((5 - 9 / 14) / 13) for x in (1, -1, 0, 0, 0, 1)],
    ),
]


@pytest.mark.parametrize(("name", "want"), BY_HAND)
def test_known_values(name: str, want: list[float]) -> None:
    assert estimate(name, HAND) == pytest.approx(want, abs=2e-6)


def test_no_estimator_is_without_known_values() -> None:
    assert {name for name, _ in BY_HAND} == set(WITHOUT_CRITIC)


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
@few
@given(outcomes=steps(), draw=st.randoms())
def test_the_order_of_trajectories_and_groups_does_not_matter(
    name: str, outcomes: Outcomes, draw: Random
) -> None:
    n = len(outcomes.rewards_N)
    order = list(range(n))
    draw.shuffle(order)
    names = list(range(4))
    draw.shuffle(names)
    assert outcomes.greedy_N is not None
    tokens = [outcomes.tokens_S[outcomes.trajectories_S == i].tolist() for i in range(n)]
    shuffled = Outcomes.of(
        outcomes.rewards_N[order].tolist(),
        [names[g] for g in outcomes.groups_N[order]],
        tokens=[tokens[i] for i in order],
        greedy=outcomes.greedy_N[order].tolist(),
    )
    got, want = estimate(name, shuffled), estimate(name, outcomes)
    assert got == [want[i] for i in order]  # in every bit


@pytest.mark.parametrize("name", sorted(set(WITHOUT_CRITIC) - {"reinforce_plus_plus", "remax"}))
@few
@given(value=st.sampled_from([0.1, 0.3, 1 / 3, 0.7]), size=st.integers(2, 30))
def test_equal_rewards_have_exactly_no_advantage(name: str, value: float, size: int) -> None:
    tokens = [[1 + i] for i in range(size)]
    assert estimate(name, Outcomes.of([value] * size, [0] * size, tokens=tokens)) == [0.0] * size


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_how_a_trajectory_is_split_into_samples_does_not_matter(name: str) -> None:
    whole = Outcomes.of(
        HAND.rewards_N.tolist(),
        HAND.groups_N.tolist(),
        tokens=[[count] for count in HAND.tokens_N.tolist()],
        greedy=None if HAND.greedy_N is None else HAND.greedy_N.tolist(),
    )
    assert estimate(name, whole) == estimate(name, HAND)


@given(st.lists(rewards, min_size=2, max_size=16))
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order(values: list[float]) -> None:
    got = estimate("grpo", Outcomes.of(values, [0] * len(values)))
    assert sum(got) == pytest.approx(0.0, abs=1e-6)
    by_reward = [a for _, a in sorted(zip(values, got, strict=True))]
    assert all(low <= high for low, high in pairwise(by_reward))


@given(st.lists(rewards, min_size=2, max_size=8), rewards)
def test_a_constant_added_to_all_rewards_changes_nothing(values: list[float], shift: float) -> None:
    groups = [0] * len(values)
    moved = estimate("dr_grpo", Outcomes.of([v + shift for v in values], groups))
    assert moved == pytest.approx(estimate("dr_grpo", Outcomes.of(values, groups)), abs=1e-6)


def test_what_cannot_be_estimated_is_refused() -> None:
    with pytest.raises(ValueError, match="a reward of group 'b' is nan"):
        Outcomes.of([0.0, math.nan], ["a", "b"])
    with pytest.raises(ValueError, match="zip"):
        Outcomes.of([0.0, 1.0], ["a"])
    with pytest.raises(ValueError, match=r"a reward is -1: use rewards from 0"):
        advantages.maxrl(Outcomes.of([-1.0, 1.0], [0, 0]))
    with pytest.raises(ValueError, match="needs the reward of a greedy trajectory"):
        advantages.remax(Outcomes.of([-1.0, 1.0], [0, 0]))


def _large(count: int) -> Outcomes:
    draw = np.random.default_rng(0)
    return replace(
        Outcomes.of([0.0], [0]),
        rewards_N=draw.integers(0, 2, count).astype(np.float64),
        groups_N=np.arange(count) // 8,
        trajectories_S=np.arange(count),
        tokens_S=np.full(count, 4096),
        greedy_N=np.zeros(count),
    )


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_memory_is_a_few_numbers_per_trajectory_however_long_they_are(name: str) -> None:
    outcomes = _large(4096)
    tracemalloc.start()
    estimate(name, outcomes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4096 * 300


def test_charges_of_tokens_come_off_the_reward_of_their_trajectory() -> None:
    """Of two samples, one of them without a sampled token; observed tokens are no part of it."""
    outcomes = Outcomes.of(
        [1.0, 0.0], ["a", "a"], tokens=[[2, 0, 1], [1]], charges=[0.1, 0.2, -0.3, 0.25]
    )
    assert outcomes.rewards_N.tolist() == pytest.approx([1.0, -0.25])
    assert estimate("dr_grpo", outcomes) == pytest.approx([0.625, -0.625])
    assert outcomes.rewards_T is not None
    # The last token of each sample has the trajectory's reward.
    assert outcomes.rewards_T.tolist() == pytest.approx([-0.1, 0.8, 1.3, -0.25])
    with pytest.raises(ValueError, match="there are 1 charges for 4 sampled tokens"):
        Outcomes.of([1.0, 0.0], ["a", "a"], tokens=[[2, 0, 1], [1]], charges=[0.1])


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_the_return_of_a_token_is_less_by_the_charges_from_it_on(gamma: float) -> None:
    outcomes = Outcomes.of(
        [1.0, 0.0], ["a", "a"], tokens=[[2, 0, 1], [1]], charges=[0.1, 0.2, -0.3, 0.25]
    )
    returns = [-0.1 + gamma * 0.8, 0.8, 1.3, -0.25]
    mean, var = statistics.mean(returns), statistics.variance(returns)
    want = [(r - mean) / math.sqrt(var + 1e-8) for r in returns]
    assert estimate("reinforce_plus_plus", outcomes, gamma=gamma) == pytest.approx(want)


@few
@given(steps())
def test_charges_of_nothing_change_nothing(outcomes: Outcomes) -> None:
    free = Outcomes.of(
        outcomes.rewards_N.tolist(),
        outcomes.groups_N.tolist(),
        tokens=[
            outcomes.tokens_S[outcomes.trajectories_S == n].tolist()
            for n in range(len(outcomes.rewards_N))
        ],
        greedy=None if outcomes.greedy_N is None else outcomes.greedy_N.tolist(),
        charges=[0.0] * int(outcomes.tokens_S.sum()),
    )
    for name in WITHOUT_CRITIC:
        per_trajectory = name != "reinforce_plus_plus"
        want = estimate(name, outcomes)
        if not per_trajectory:
            want = np.repeat(want, outcomes.tokens_N).tolist()
        assert estimate(name, free) == pytest.approx(want, abs=1e-9)
