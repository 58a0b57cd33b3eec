import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.tools.rewards.gsm8k import MODES, Mode, extract, score


@pytest.mark.parametrize(
    ("text", "strict", "flexible", "fixed"),
    [
        ("#### 42", "42", "42", "42"),
        ("so it is 42", None, "42", None),
        ("#### 1 and #### 2", "2", "2", "2"),
        ("#### 42 apples out of 50", "42", "50", "42"),
        ("#### -7", "-7", "-7", "-7"),
        ("#### 0.25", "0.25", "0.25", "0.25"),
        ("no number", None, None, None),
        ("", None, None, None),
        # Quirk 1: a sentence stop sticks to the number.
        ("#### 42.", "42.", "42.", "42"),
        # Quirk 2: flexible keeps thousands separators, strict removes them.
        ("#### 1,234", "1234", "1,234", "1234"),
        # Quirk 3: strict needs exactly one space after the mark.
        ("####42", None, "42", "42"),
        ("####  42", None, "42", "42"),
        ("####\n42", None, "42", "42"),
        # Quirk 4: where every candidate is invalid, flexible returns the first of them.
        ("wait . no ...", None, "...", None),
        ("wait . no .", None, ".", None),
        # Quirk 5: a currency sign ends the strict match.
        ("#### $42", None, "42", "42"),
        ("#### -$42", None, "42", "-42"),
        ("**#### 42**", "42", "42", "42"),
        ("#### **42**", None, "42", "42"),
        # Quirk 6: a comma alone is a number to flexible.
        ("#### ,", "", ",", None),
    ],
)
def test_what_each_mode_reads(
    text: str, strict: str | None, flexible: str | None, fixed: str | None
) -> None:
    assert [extract(text, mode=mode) for mode in MODES] == [strict, flexible, fixed]


def test_strict_and_flexible_see_the_last_300_characters_only() -> None:
    pushed_out = "#### 42" + "x" * 294
    assert extract(pushed_out, mode="strict") is None
    assert extract(pushed_out[1:], mode="strict") is None
    assert extract("#### 42" + "x" * 293, mode="strict") == "42"
    assert extract("42" + "x" * 299, mode="flexible") == "2"
    assert extract(pushed_out, mode="fixed") == "42"


@pytest.mark.parametrize(
    ("text", "truth", "rewards"),
    [
        ("#### 42", "42", (1.0, 1.0, 1.0)),
        ("#### 41", "42", (0.0, 0.0, 0.0)),
        ("#### 42.", "42", (0.0, 0.0, 1.0)),
        ("#### 42.0", "42", (0.0, 0.0, 1.0)),
        ("#### 1,234", "1234", (1.0, 0.0, 1.0)),
        ("#### 1,234", "1,234", (0.0, 1.0, 1.0)),
        ("42", "42", (0.0, 1.0, 0.0)),
        ("nothing", "42", (0.0, 0.0, 0.0)),
    ],
)
def test_rewards(text: str, truth: str, rewards: tuple[float, ...]) -> None:
    assert tuple(score(text, truth, mode=mode) for mode in MODES) == rewards


def test_a_mark_followed_by_nothing_but_space_is_read_in_linear_time() -> None:
    """A model stuck on newlines: quadratic, this text would take minutes."""
    assert extract("####" + "\n" * 200_000, mode="fixed") is None


def test_fixed_needs_a_ground_truth_that_is_a_number() -> None:
    with pytest.raises(ValueError, match="'forty-two' is not a number"):
        score("#### 42", "forty-two", mode="fixed")


@settings(deadline=None)
@given(st.text(alphabet=string.ascii_letters + " .,", max_size=200), st.integers(-(10**9), 10**9))
def test_every_mode_accepts_the_plain_answer(reasoning: str, answer: int) -> None:
    for mode in MODES:
        assert score(f"{reasoning}\n#### {answer}", str(answer), mode=mode) == 1.0


@settings(deadline=None)
@given(st.text(), st.sampled_from(MODES))
def test_no_text_raises(text: str, mode: Mode) -> None:
    assert score(text, "42", mode=mode) in (0.0, 1.0)


@settings(deadline=None)
@given(st.text(alphabet="0123456789#.,$-* ", max_size=60))
def test_fixed_accepts_whatever_strict_accepts(text: str) -> None:
    answer = extract(text, mode="strict")
    if answer is not None and answer.lstrip("-").isdigit() and "$" not in text:
        assert extract(text, mode="fixed") is not None
