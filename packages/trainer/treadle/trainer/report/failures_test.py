import runpy
from pathlib import Path

from treadle.agent_loop import RewardError, ToolError, Trajectory, boundary
from treadle.trainer.report.failures import FirstFailures, causes, of_own_code, whole_traceback
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


def _wrong(text: str) -> Trajectory:
    return Trajectory.failed(make_task(), RewardError(f"the reward a.py:score: {text}"))


def test_each_cause_is_one_line_however_its_values_differ(tmp_path: Path) -> None:
    told = [
        *(
            _wrong(f"the reward is {value}; it must be finite")
            for value in ("nan", "'1.0'", "None")
        ),
        *(_wrong(f"the reward is {1e30 * n}; it must be between -1e6 and 1e6") for n in (1, 2)),
        *(failed(tmp_path / "a.py", f"raise ValueError({n})") for n in range(3)),
        _wrong('the mapping has no "score"; it has: reward'),
    ]
    lines = list(causes(told))
    assert [line.split(" x ")[0] for line in lines] == ["3", "2", "1", "1", "1", "1"]
    assert len(FirstFailures().take(told)) == len(lines)
    many = [_wrong("".join(chr(97 + n) for n in divmod(number, 26))) for number in range(30)]
    assert list(causes(many))[-1] == "10 of 10 other kinds"


def test_a_bug_of_the_user_is_told_from_what_may_serve_again(tmp_path: Path) -> None:
    assert of_own_code(failed(tmp_path / "a.py", "return {}['x']").error)
    assert of_own_code(_wrong("the reward is None").error)
    assert not of_own_code(failed(tmp_path / "b.py", "raise ConnectionError('x')").error)
    assert not of_own_code(failed(tmp_path / "c.py", "raise TimeoutError").error)
    assert not of_own_code(ToolError("sandbox down"))
    assert not of_own_code(None)
    sent = RewardError("reward of task 't'")
    sent.__cause__ = Exception("Traceback ...\nhttpx.ConnectionError: refused\n\nRewardError: x")
    assert not of_own_code(sent)


def test_causes_are_counted_by_kind_of_error() -> None:
    down = Trajectory.failed(make_task(), ToolError("down"))
    wrong = Trajectory.failed(make_task(), RewardError("wrong"))
    assert list(causes([down, make_trajectory(), wrong, wrong])) == [
        "2 x RewardError, as: wrong",
        "1 x ToolError, as: down",
    ]
