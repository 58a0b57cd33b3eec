import runpy
from pathlib import Path

from treadle.agent_loop import RewardError, ToolError, Trajectory, boundary
from treadle.trainer.report.failures import FirstFailures, causes, whole_traceback
from treadle.trainer.report.testing import make_task, make_trajectory


def failed(file: Path, line: str) -> Trajectory:
    """A trajectory whose reward, in `file`, failed in `line`."""
    file.write_text(f"def score():\n    {line}\n")
    score = runpy.run_path(str(file))["score"]
    try:
        with boundary(RewardError, "reward of task 't'"):
            score()
    except RewardError as error:
        return Trajectory.failed(make_task(), error)
    raise AssertionError("it did not fail")


def test_the_first_failure_of_a_kind_is_shown_with_its_line(tmp_path: Path) -> None:
    failures = FirstFailures()
    name = failed(tmp_path / "a.py", "return undefined_name")
    again = failed(tmp_path / "a.py", "return undefined_name")
    other = failed(tmp_path / "b.py", "return 1 / 0")
    taken = failures.take([make_trajectory(), name, again, other])
    assert [trajectory for trajectory, _ in taken] == [name, other]
    code = f'  File "{tmp_path / "a.py"}", line 2, in score\n    return undefined_name'
    assert taken[0][1].startswith(code)
    assert failures.take([again, other]) == []


def test_a_failure_without_user_code_has_no_line() -> None:
    down = Trajectory.failed(make_task(), ToolError("sandbox down"))
    assert FirstFailures().take([down]) == [(down, "")]


def test_the_whole_traceback_has_the_users_line_and_ours(tmp_path: Path) -> None:
    error = failed(tmp_path / "a.py", "return undefined_name").error
    assert error is not None
    text = whole_traceback(error)
    assert "return undefined_name" in text
    assert text.endswith(f"({tmp_path / 'a.py'}:2, in score)")


def test_causes_are_counted_by_kind_of_error() -> None:
    down = Trajectory.failed(make_task(), ToolError("down"))
    wrong = Trajectory.failed(make_task(), RewardError("wrong"))
    assert list(causes([down, make_trajectory(), wrong, wrong])) == [
        "2 x RewardError, as: wrong",
        "1 x ToolError, as: down",
    ]
