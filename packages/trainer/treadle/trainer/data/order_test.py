import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.trainer.data import DataError, DataOrder

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
