import pytest

from treadle.agent_loop import SetupError
from treadle.trainer.problems import Problems, SeveralProblems


def _found(*errors: Exception) -> Problems:
    problems = Problems(SetupError, ValueError)
    for error in errors:
        with problems.collected():
            raise error
    return problems


def test_nothing_wrong_raises_nothing() -> None:
    _found().raise_if_any()


def test_one_problem_is_raised_as_it_is() -> None:
    only = ValueError("a=1: take 2")
    with pytest.raises(ValueError, match=r"^a=1: take 2$") as raised:
        _found(only, ValueError("a=1: take 2")).raise_if_any()
    assert raised.value is only


def test_several_are_numbered_each_once_with_their_lines_and_notes() -> None:
    noted = ValueError("second")
    noted.add_note("its note")
    nested = SeveralProblems((SetupError("first\nlog"), noted))
    with pytest.raises(SeveralProblems) as raised:
        _found(SetupError("first\nlog"), nested, SetupError("third")).raise_if_any()
    assert str(raised.value).splitlines() == [
        "3 problems",
        "  1. first",
        "     log",
        "  2. second",
        "     its note",
        "  3. third",
    ]


def test_what_is_no_problem_of_the_input_passes() -> None:
    problems = Problems(ValueError)
    with pytest.raises(KeyError), problems.collected():
        raise KeyError("a bug")
    problems.raise_if_any()
