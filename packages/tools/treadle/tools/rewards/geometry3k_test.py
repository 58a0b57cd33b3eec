import importlib.util
import time

import pytest

from treadle.agent_loop import SetupError
from treadle.tools.rewards import check_data_sources, geometry3k, resolve


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("3", "3", True),
        ("3.0", "3", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"2\sqrt{221}", r"\sqrt{884}", True),
        (r"\frac{6 \sqrt{3}}{2}", r"3\sqrt{3}", True),
        ("12", "21", False),
        (r"x^{2}", "2", False),
        ("__import__('os').getcwd()", "3", False),
        ("", "3", False),
    ],
)
def test_answers_are_compared_as_mathematics(answer: str, truth: str, right: bool) -> None:
    assert geometry3k.is_right(rf"so \boxed{{{answer}}}", truth) is right


def test_a_text_without_a_box_is_wrong() -> None:
    assert not geometry3k.is_right("3", "3")
    assert not geometry3k.is_right(r"\boxed{3", "3")


@pytest.mark.parametrize(
    ("text", "formed"),
    [
        ("<think>a\nb</think> it is\n\\boxed{3}.", True),
        ("well, <think>a</think> \\boxed{3}", False),
        ("\\boxed{3} <think>a</think>", False),
        ("<think>a</think> 3", False),
    ],
)
def test_the_form_is_reasoning_and_then_a_box(text: str, formed: bool) -> None:
    assert geometry3k.has_form(text) is formed


def test_the_answer_weighs_nine_times_its_form() -> None:
    assert geometry3k.weigh(right=True, formed=False) == pytest.approx(0.9)
    assert geometry3k.weigh(right=False, formed=True) == pytest.approx(0.1)


def test_marks_without_an_end_cost_no_time() -> None:
    # The time of this process: a pattern takes hours.
    begun = time.process_time()
    text = "<think>" + "</think>" * 20_000 + "\\boxed{" * 20_000
    assert not geometry3k.has_form(text)
    assert geometry3k.has_form(text + "}")
    assert time.process_time() - begun < 5


def test_a_missing_library_is_told_when_the_reward_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    why = r"the reward geometry3k needs math_verify, .*pip install 'treadle-tools\[math\]'"
    with pytest.raises(SetupError, match=why):
        resolve("geometry3k")
    with pytest.raises(SetupError, match=why):
        check_data_sources(["hiyouga/geometry3k"])
