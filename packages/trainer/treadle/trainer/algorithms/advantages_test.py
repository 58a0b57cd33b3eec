import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.trainer.algorithms.advantages import group_advantages

rewards = st.floats(-100.0, 100.0, allow_subnormal=False)


def test_a_group_is_centred_and_scaled_by_its_unbiased_deviation() -> None:
    # mean 0.5, unbiased deviation sqrt(4 * 0.25 / 3) = 0.57735
    got = group_advantages([1.0, 0.0, 0.0, 1.0], ["a"] * 4)
    assert got == pytest.approx([0.5 / (1 / math.sqrt(3) + 1e-6) * s for s in (1, -1, -1, 1)])


def test_dr_grpo_only_centres() -> None:
    assert group_advantages([3.0, 1.0], [0, 0], norm_by_std=False) == [1.0, -1.0]


def test_a_group_of_one_keeps_its_reward() -> None:
    assert group_advantages([0.7], ["a"], norm_by_std=False) == [0.7]
    assert group_advantages([0.7], ["a"]) == pytest.approx([0.7 / (1.0 + 1e-6)])


def test_groups_need_not_be_adjacent() -> None:
    got = group_advantages([1.0, 5.0, 3.0, 9.0], ["a", "b", "a", "b"], norm_by_std=False)
    assert got == [-1.0, -2.0, 1.0, 2.0]


@given(st.sampled_from([0.1, 0.3, 1 / 3, 0.7]), st.integers(2, 30))
def test_equal_rewards_have_exactly_no_advantage(reward: float, size: int) -> None:
    assert group_advantages([reward] * size, [0] * size) == [0.0] * size


@given(st.lists(rewards, min_size=2, max_size=16))
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order(values: list[float]) -> None:
    got = group_advantages(values, [0] * len(values))
    assert sum(got) == pytest.approx(0.0, abs=1e-6)
    by_reward = [a for _, a in sorted(zip(values, got, strict=True))]
    assert all(low <= high for low, high in pairwise(by_reward))


@given(st.lists(rewards, min_size=2, max_size=8), rewards)
def test_a_constant_added_to_all_rewards_changes_nothing(values: list[float], shift: float) -> None:
    groups = [0] * len(values)
    moved = group_advantages([v + shift for v in values], groups, norm_by_std=False)
    assert moved == pytest.approx(group_advantages(values, groups, norm_by_std=False), abs=1e-9)


def test_a_reward_that_is_not_finite_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="reward 1 of group 'b' is nan"):
        group_advantages([0.0, math.nan], ["a", "b"])


def test_every_reward_needs_a_group() -> None:
    with pytest.raises(ValueError, match="zip"):
        group_advantages([0.0, 1.0], ["a"])
