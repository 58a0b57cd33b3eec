import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.tracing import TraceSampler


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 0), (1.0, 1000)])
def test_the_ends_of_the_range_are_none_and_all(rate: float, expected: int) -> None:
    sampler = TraceSampler(rate=rate)
    assert sum(sampler.wants(3, index) for index in range(1000)) == expected


def test_the_share_is_near_the_rate_and_differs_by_step_and_seed() -> None:
    sampler = TraceSampler(rate=0.2)
    chosen = [{i for i in range(5000) if sampler.wants(step, i)} for step in (1, 2)]
    assert all(900 < len(indices) < 1100 for indices in chosen)
    assert chosen[0] != chosen[1]
    assert chosen[0] != {i for i in range(5000) if TraceSampler(rate=0.2, seed=1).wants(1, i)}


def test_the_choice_is_pinned_so_that_a_resumed_run_traces_the_same() -> None:
    sampler = TraceSampler(rate=0.5, seed=7)
    assert [index for index in range(12) if sampler.wants(4, index)] == [0, 3, 4, 6, 7, 9, 10, 11]


@settings(deadline=None)
@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_higher_rate_keeps_what_a_lower_one_chose(
    step: int, index: int, a: float, b: float
) -> None:
    low, high = sorted((a, b))
    if TraceSampler(rate=low).wants(step, index):
        assert TraceSampler(rate=high).wants(step, index)


def test_it_draws_no_random_numbers() -> None:
    state = random.getstate()
    TraceSampler(rate=0.5).wants(1, 2)
    assert random.getstate() == state


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_outside_its_range_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        TraceSampler(rate=rate)


def test_a_limited_choice_does_not_depend_on_order_and_obeys_the_rate() -> None:
    sampler = TraceSampler(rate=0.5, seed=7)
    assert sampler.choose(4, range(12), at_most=None) == {0, 3, 4, 6, 7, 9, 10, 11}
    three = sampler.choose(4, range(12), at_most=3)
    assert len(three) == 3 and three <= {0, 3, 4, 6, 7, 9, 10, 11}
    assert sampler.choose(4, [*reversed(range(12)), 5, 5], at_most=3) == three
    assert sampler.choose(4, range(12), at_most=0) == frozenset()
