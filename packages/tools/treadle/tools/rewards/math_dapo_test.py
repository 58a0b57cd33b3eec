import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.tools.rewards import math_dapo


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("x = 42", "42"),
        (r"$\frac12$", r"\frac{1}{2}"),
        (r"\sqrt2", r"\sqrt{2}"),
        ("1,234 dollars", "1234"),
        (r"\text{even}", "even"),
        (r"\boxed{7}", "7"),
        ("an apple", "apple"),
        (r"90^\circ", "90"),
        ("the price is $5$ today", "5"),
        ("1,2", "12"),  # a quirk: a pair becomes a number
    ],
)
def test_answers_are_normalised_as_minerva_does(answer: str, normal: str) -> None:
    assert math_dapo.normalise(answer) == normal


@pytest.mark.parametrize(
    ("text", "mode", "right"),
    [
        ("Answer: 42", "minerva", True),
        ("ANSWER : $42$.", "minerva", True),  # what stands outside the dollars is dropped
        ("Answer: 42.", "minerva", False),  # a quirk: a sentence's stop sticks to the number
        ("Answer: 41\nAnswer: 42", "minerva", True),
        ("Answer: 42" + "." * 300, "minerva", False),
        (r"so \boxed{42}", "minerva", False),
        (r"so \boxed{42}", "boxed", True),
        (r"\boxed{42} or \boxed{41}", "boxed", False),
        (r"\boxed{42}" + "." * 91, "boxed", False),
        (r"\boxed{\frac{4}{2}}", "boxed", False),
        (r"\boxed{42", "boxed", False),
        (r"\boxed{ 42}", "boxed", False),
    ],
)
def test_what_counts_as_right(text: str, mode: math_dapo.Mode, right: bool) -> None:
    assert math_dapo.score(text, "42", mode=mode) == (1.0 if right else -1.0)


@pytest.mark.parametrize("mode", math_dapo.MODES)
@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("025", "25", True),
        ("25", "025", True),
        ("000", "0", True),
        ("-07", "-7", True),
        ("250", "25", False),
        ("0.5", ".5", False),
        ("025x", "25x", False),
    ],
)
def test_integers_are_compared_as_integers(
    answer: str, truth: str, right: bool, mode: math_dapo.Mode
) -> None:
    text = rf"Answer: {answer}" if mode == "minerva" else rf"\boxed{{{answer}}}"
    assert math_dapo.is_right(text, truth, mode=mode) is right


def test_one_integer_is_one_answer_to_a_vote() -> None:
    assert math_dapo.extract(r"\boxed{025}", mode="boxed") == "25"


@given(st.text(alphabet=r"\{}$=.,a 1boxedfrcsqt", max_size=80), st.sampled_from(math_dapo.MODES))
def test_any_text_is_scored(text: str, mode: math_dapo.Mode) -> None:
    assert math_dapo.score(text, "1", mode=mode) in (1.0, -1.0)
