from itertools import product
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.trainer.report.at_k import at_k, expected_best, expected_majority, sizes

VALUES = st.lists(st.sampled_from([-1.0, 0.0, 0.1, 1.0]), min_size=1, max_size=5)


def majority(draw: tuple[int, ...], values: list[float], answers: list[str | None]) -> float:
    """The score of one draw: the mean over the answers that share the first place."""
    votes: dict[str, int] = {}
    for index in draw:
        answer = answers[index]
        if answer is not None:
            votes[answer] = votes.get(answer, 0) + 1
    if not votes:
        return 0.0
    first = [answer for answer, count in votes.items() if count == max(votes.values())]
    return fmean(values[answers.index(answer)] for answer in first)


@given(VALUES, st.integers(1, 4))
def test_best_and_worst_are_the_means_over_all_draws(values: list[float], k: int) -> None:
    draws = list(product(values, repeat=k))
    assert expected_best(values, k) == pytest.approx(fmean(map(max, draws)))
    if len(values) > 1:
        found = at_k([values])
        for size in sizes(len(values)):
            draws = list(product(values, repeat=size))
            assert found[f"best@{size}"].mean == pytest.approx(fmean(map(max, draws)))
            assert found[f"worst@{size}"].mean == pytest.approx(fmean(map(min, draws)))


@pytest.mark.parametrize(
    "answers",
    [
        ["7", "7", "8", "9", None],
        ["8", "8", "8", "7", "7"],
        [None, None, None, None, "7"],
        ["9", "8", "7", "6", "5"],
    ],
)
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_majority_is_that_of_all_draws(answers: list[str | None], k: int) -> None:
    values = [float(answer == "7") for answer in answers]
    exact = fmean(majority(d, values, answers) for d in product(range(5), repeat=k))
    drawn = expected_majority(values, answers, k, np.random.default_rng(42))
    # A thousand draws of a number in [0, 1] have a standard error of 0.016 at most.
    assert drawn == pytest.approx(exact, abs=4 * 0.016)


def test_the_majority_of_sure_rows_is_exact() -> None:
    found = at_k([[1, 1, 1], [0, 0, 0], [0, 0, 0]], [["7"] * 3, ["8"] * 3, [None] * 3])
    assert found["maj@3"].mean == pytest.approx(1 / 3)


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from("abc")), min_size=2), st.data()
)
def test_the_order_of_samples_changes_no_bit(
    samples: list[tuple[float, str]], data: st.DataObject
) -> None:
    other = data.draw(st.permutations(samples))
    rows = [[value for value, _ in each] for each in (samples, other)]
    votes = [[answer for _, answer in each] for each in (samples, other)]
    assert at_k([rows[0]], [votes[0]]) == at_k([rows[1]], [votes[1]])


def test_the_sizes_are_verls() -> None:
    assert [sizes(n) for n in (1, 2, 3, 8, 30)] == [[], [2], [2, 3], [2, 4, 8], [2, 4, 8, 16, 30]]


def test_the_interval_is_that_of_the_rows() -> None:
    # 100 rows, half of them sure: the mean of resamplings has the deviation sqrt(.25 / 100).
    found = at_k([[1, 1]] * 50 + [[0, 0]] * 50)["mean@2"]
    assert found.mean == 0.5
    assert found.low == pytest.approx(0.5 - 1.96 * 0.05, abs=0.02)
    assert found.high == pytest.approx(0.5 + 1.96 * 0.05, abs=0.02)
    sure = at_k([[1, 0]] * 7)["mean@2"]
    assert (sure.low, sure.high) == (0.5, 0.5)
    assert at_k([[1, 0]])["mean@2"].low is None


@given(st.lists(st.lists(st.floats(-5, 5), min_size=4, max_size=4), min_size=1, max_size=4))
def test_more_samples_are_never_worse_at_best(rows: list[list[float]]) -> None:
    found = at_k(rows)
    chain = [found[n].mean for n in ("worst@4", "worst@2", "mean@4", "best@2", "best@4")]
    assert chain == pytest.approx(sorted(chain))


def test_rows_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the same number of samples, got \[1, 2\]"):
        at_k([[1, 0], [1]])
