import time
from collections import Counter
from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.trainer.data import DataError, DataOrder, Prompt, Row
from treadle.trainer.data.order import make_order

orders = st.builds(
    lambda batch_size, more, seed, shuffle: DataOrder(
        num_rows=batch_size + more, batch_size=batch_size, seed=seed, shuffle=shuffle
    ),
    st.integers(1, 9),
    st.integers(0, 40),
    st.integers(0, 2**31 - 1),
    st.booleans(),
)


@settings(deadline=None)
@given(orders, st.integers(0, 5))
def test_an_epoch_visits_every_row_at_most_once_and_all_but_the_rest(
    order: DataOrder, epoch: int
) -> None:
    first = 1 + epoch * order.steps_per_epoch
    steps = range(first, first + order.steps_per_epoch)
    visited = [index for step in steps for index in order.batch(step)]
    assert len(visited) == len(set(visited)) == order.num_rows - order.left_out
    assert set(visited) <= set(range(order.num_rows))
    assert {order.epoch(step) for step in steps} == {epoch}
    assert all(len(order.batch(step)) == order.batch_size for step in steps)


@settings(deadline=None)
@given(orders, st.integers(1, 200))
def test_a_step_has_the_same_rows_whatever_was_asked_before(order: DataOrder, step: int) -> None:
    again = DataOrder(
        num_rows=order.num_rows,
        batch_size=order.batch_size,
        seed=order.seed,
        shuffle=order.shuffle,
    )
    for earlier in range(1, min(step, 10)):
        order.batch(earlier)
    assert again.batch(step) == order.batch(step)


def test_the_order_is_pinned_since_old_runs_resume_with_it() -> None:
    order = DataOrder(num_rows=10, batch_size=4, seed=7)
    assert [order.batch(step) for step in (1, 2, 3)] == [
        (9, 7, 5, 2),
        (0, 3, 6, 8),
        (0, 5, 3, 4),
    ]


def test_epochs_and_seeds_differ() -> None:
    order = DataOrder(num_rows=50, batch_size=50, seed=0)
    other = DataOrder(num_rows=50, batch_size=50, seed=1)
    assert len({order.batch(1), order.batch(2), other.batch(1)}) == 3


def test_without_shuffling_the_file_order_is_kept() -> None:
    order = DataOrder(num_rows=5, batch_size=2, seed=0, shuffle=False)
    assert [order.batch(step) for step in (1, 2, 3)] == [(0, 1), (2, 3), (0, 1)]
    assert order.left_out == 1


def test_a_batch_larger_than_the_dataset_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"needs 8 rows, but the dataset has 5: lower data.prompts"):
        DataOrder(num_rows=5, batch_size=8, seed=0)
    with pytest.raises(DataError, match="at least 1 row"):
        DataOrder(num_rows=5, batch_size=0, seed=0)


def test_steps_are_counted_from_one() -> None:
    with pytest.raises(ValueError, match="counted from 1, got 0"):
        DataOrder(num_rows=5, batch_size=1, seed=0).batch(0)


def _prompts(sources: Iterable[str]) -> list[Prompt]:
    return [
        Prompt(
            row=Row(index=i, place=f"row {i}", columns={"data_source": source}, exact=True),
            split="train",
            loop="single_turn_agent",
            messages=(),
            num_tokens=1,
        )
        for i, source in enumerate(sources)
    ]


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcd"), st.floats(0.5, 4), min_size=1),
    st.integers(16, 40),
    st.integers(1, 60),
    st.randoms(use_true_random=False),
)
def test_a_mix_has_the_same_share_of_each_source_in_every_step(
    weights: dict[str, float], batch_size: int, step: int, random: Random
) -> None:
    sources = [name for name in weights for _ in range(50)]
    random.shuffle(sources)
    prompts = _prompts(sources)
    order = make_order(prompts, weights, batch_size=batch_size, seed=3, shuffle=True)
    batch = order.batch(step)
    assert len(batch) == len(set(batch)) == order.batch_size == batch_size
    found = Counter(sources[row] for row in batch)
    total = sum(weights.values())
    assert all(abs(found[name] - batch_size * share / total) < 1 for name, share in weights.items())
    again = make_order(prompts, weights, batch_size=batch_size, seed=3, shuffle=True)
    assert again.batch(step) == batch
    # Whatever is cut off at the end is of all sources alike.
    for end in range(1, batch_size):
        some = Counter(sources[row] for row in batch[:end])
        assert all(abs(some[name] - found[name] * end / batch_size) <= 1.5 for name in weights)


def test_many_sources_are_shuffled_once_an_epoch() -> None:
    names = [f"s{i}" for i in range(40)]
    sources = [name for name in names for _ in range(2_000)]
    weights = dict.fromkeys(names, 1e308)
    order = make_order(_prompts(sources), weights, batch_size=40, seed=0, shuffle=True)
    order.batch(1)
    began = time.process_time()
    for _ in range(100):
        order.batch(2)
    assert time.process_time() - began < 1.0, "100 shuffles of 80,000 rows take more than 5 s"


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ({"a": 1.0}, "data.weights.b is missing"),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, "data.weights.c is of no training row"),
        ({"a": 1.0, "b": 99.0}, "gives 0 of the 8 rows of a step, and a has 9"),
        ({"a": 1.0, "b": 1.0}, "gives 4 of the 8 rows of a step, and b has 1"),
    ],
)
def test_weights_that_do_not_fit_the_rows_are_refused(
    weights: dict[str, float], problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        make_order(_prompts("aaaaaaaaab"), weights, batch_size=8, seed=0, shuffle=True)
