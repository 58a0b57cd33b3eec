import asyncio
import json
import runpy
from pathlib import Path

import pytest

from treadle.agent_loop import RewardError, RolloutError, ToolError, boundary, user_place
from treadle.agent_loop.user_code import user_frame

_REWARD = """\
import json


def helper(text):
    return json.loads(text)


def score(text):
    return undefined_name if text is None else helper(text)
"""


def _raised(path: Path, text: str | None) -> Exception:
    path.write_text(_REWARD)
    score = runpy.run_path(str(path))["score"]
    try:
        score(text)
    except Exception as error:
        return error
    raise AssertionError("it did not raise")


def test_a_typing_error_has_its_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "my_reward.py"
    error = _raised(file, None)
    assert user_place(error) == f"{file}:9, in score"
    frame = user_frame(error)
    assert frame is not None


def test_a_library_that_raises_is_not_the_place(tmp_path: Path) -> None:
    file = tmp_path / "my_reward.py"
    error = _raised(file, "{")
    assert isinstance(error, json.JSONDecodeError)
    assert user_place(error) == f"{file}:5, in helper"


def test_the_path_is_as_short_as_it_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert user_place(_raised(tmp_path / "my_reward.py", None)) == "my_reward.py:9, in score"


def test_an_error_of_our_own_code_has_no_place() -> None:
    with pytest.raises(RolloutError) as raised, boundary(ToolError, "tool 'f'"):
        asyncio.run(asyncio.wait_for(asyncio.Event().wait(), 0))
    assert user_place(raised.value) is None
    assert str(raised.value) == "tool 'f': TimeoutError: "


def test_a_boundary_says_the_place_of_the_cause(tmp_path: Path) -> None:
    file = tmp_path / "my_reward.py"
    with pytest.raises(RewardError) as raised, boundary(RewardError, "reward of task 't'"):
        raise _raised(file, None)
    assert str(raised.value) == (
        f"reward of task 't': NameError: name 'undefined_name' is not defined ({file}:9, in score)"
    )
    assert user_place(raised.value) == f"{file}:9, in score"
