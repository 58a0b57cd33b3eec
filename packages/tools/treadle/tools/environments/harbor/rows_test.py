"""Rows of tasks where Harbor is not: what is wrong, in which words."""

import sys
from pathlib import Path

import pytest

from treadle.agent_loop import SetupError
from treadle.tools.environments import read_rows


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("harbor: tasks\n", "needs harbor, which is not installed: pip install 'treadle-tools"),
        ("harbor: tasks\npython: /no/python\n", "'/no/python' does not start"),
        (f"harbor: tasks\npython: {sys.executable}\n", "needs treadle-tools.harbor.: "),
        ("harbor: tasks@2.0\npython: p\n", "needs the network: harbor download tasks@2.0 -o"),
        (
            "harbor: tasks\npython: p\nnetwork: all\n",
            "network must be one of none, host, got 'all'",
        ),
        ("harbor: tasks\npython: p\nimages: x\n", "images must be a list of strings"),
        ("harbor: tasks\nagents: x\n", "unknown key 'agents', did you mean 'agent'"),
    ],
)
def test_what_is_wrong_is_an_error_before_the_start(
    tmp_path: Path, text: str, problem: str
) -> None:
    (tmp_path / "tasks" / "one").mkdir(parents=True)
    (tmp_path / "tasks" / "one" / "task.toml").touch()
    file = tmp_path / "tasks.yaml"
    file.write_text(text)
    with pytest.raises(SetupError, match=problem):
        list(read_rows(file))
