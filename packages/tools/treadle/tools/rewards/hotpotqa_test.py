import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.tools.rewards import hotpotqa

words = st.lists(st.sampled_from(["red", "blue", "green", "The", "a", "yes", "no"]), max_size=5)


@pytest.mark.parametrize(
    ("text", "truths", "em", "f1"),
    [
        ("<answer>The Beatles!</answer>", ["beatles"], 1.0, 1.0),
        ("<answer>Paul</answer> no, <answer> John Lennon </answer>", ["John Lennon"], 1.0, 1.0),
        ("<answer>John Winston Lennon</answer>", ["John Lennon"], 0.0, 0.8),
        ("<answer>yes indeed</answer>", ["yes"], 0.0, 0.0),
        ("<answer>Paris</answer>", ["Lutetia", "Paris, France"], 0.0, 2 / 3),
        ("John Lennon", ["John Lennon"], 0.0, 0.0),
        ("<answer></answer>", ["x"], 0.0, 0.0),
        ("<answer>x</answer>" * 11, ["x"], 0.25, 0.25),
    ],
)
def test_answers_are_matched_exactly_and_by_words(
    text: str, truths: list[str], em: float, f1: float
) -> None:
    assert hotpotqa.score(text, truths, mode="em") == em
    assert hotpotqa.score(text, truths, mode="f1") == pytest.approx(f1)


@given(words, words)
def test_f1_is_symmetric_and_one_only_for_the_same_words(a: list[str], b: list[str]) -> None:
    one, other = hotpotqa.normalise(" ".join(a)), hotpotqa.normalise(" ".join(b))
    score = hotpotqa.f1(one, other)
    assert score == hotpotqa.f1(other, one)
    assert 0.0 <= score <= 1.0
    same = sorted(one.split()) == sorted(other.split())
    assert (score == 1.0) is (same and bool(one))


def test_tags_left_open_cost_no_time() -> None:
    # The time of this process: a pattern takes minutes.
    begun = time.process_time()
    assert hotpotqa.extract("<answer>" * 100_000) is None
    assert hotpotqa.extract("<answer>a<answer>b</answer>" + "<answer>" * 100_000) == "a<answer>b"
    assert time.process_time() - begun < 5
