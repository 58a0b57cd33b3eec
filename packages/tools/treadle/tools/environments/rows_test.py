"""Rows of environments: names, settings, and what is wrong with them."""

from pathlib import Path

import pytest

from treadle.agent_loop import AgentTask, Message, SetupError
from treadle.tools.environments import is_environment, read_rows
from treadle.tools.environments.settings import settings_of

_CODE = '''
class Count:
    """Counts the model's turns."""

    def __init__(self, start=0):
        self.start = start

    def reset(self, *, seed=None):
        return f"seed {seed} from {self.start}", {}

class Silent(Count):
    def reset(self, *, seed=None):
        return 3, {}
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(_CODE)
    return tmp_path


def _yaml(folder: Path, text: str) -> Path:
    file = folder / "environment.yaml"
    file.write_text(text)
    return file


def test_what_is_an_environment() -> None:
    assert is_environment("textarena:KuhnPoker-v0")
    assert is_environment(Path("somewhere/calc.yaml"))
    assert not is_environment("train.jsonl")
    assert not is_environment("hf://datasets/org/name/train.parquet")
    assert not is_environment("elsewhere:thing")


def test_a_file_of_settings_makes_a_row_per_seed(folder: Path) -> None:
    file = _yaml(
        folder,
        "gymnasium: mine.py:Count\nrows: 3\nfirst_seed: 7\ninstructions: Count.\n"
        "arguments: {start: 2}\n",
    )
    made = list(read_rows(file))
    assert [place for place, _ in made] == [f"{file}, row {number}" for number in (1, 2, 3)]
    assert made == list(read_rows(file))  # the same again: a run resumes by the row's number
    row = made[0][1]
    assert row["data_source"] == f"gymnasium/{folder}/mine.py:Count"
    assert row["agent_name"] == "treadle.tools.environments.gymnasium:GymnasiumLoop"
    assert row["prompt"] == [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": f"{folder}/mine.py:Count, seed 7"},
    ]
    task = AgentTask(
        task_id="0",
        sample_index=0,
        rollout_index=0,
        loop="",
        messages=(Message(role="user", content="x"),),
        fields=row,
    )
    settings, extra = settings_of(task, "gymnasium")
    assert settings.mapping("arguments") == {"start": 2}
    assert extra["seed"] == 7
    with pytest.raises(SetupError, match='as "textarena:NAME" or by a YAML file'):
        settings_of(task, "textarena")


def test_a_name_alone_is_an_environment_with_the_defaults(folder: Path) -> None:
    assert len(list(read_rows(f"gymnasium:{folder}/mine.py:Count"))) == 256


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("gymnasium: mine.py:Count\nseeds: 3", "unknown key 'seeds'.*known are gymnasium, rows, f"),
        ("rows: 3", "names 0 libraries; it must have one of the keys gymnasium, harbor, openenv, "),
        ("gymnasium: a\ntextarena: b", "names 2 libraries"),
        ("gymnasium: 3", "gymnasium must be an environment's name, got 3"),
        ("gymnasium: mine.py:Count\nrows: 0", "rows must be a whole number of at least 1, got 0"),
        ("gymnasium: mine.py:Count\nrows: many", "rows must be a whole number.*got 'many'"),
        ("gymnasium: mine.py:Count\nactions: up", "actions must be a list of strings, got 'up'"),
        ("gymnasium: mine.py:Count\ninstructions: [a]", "instructions must be a string"),
        ("gymnasium: mine.py:Count\narguments: 3", "arguments must be a mapping"),
        ("gymnasium: mine.py:Count\narguments: {stop: 1}", "cannot begin: TypeError.*'stop'"),
        ("gymnasium: mine.py:Silent", "an observation is 3; a text environment's is a string"),
        ("gymnasium: mine.py:Absent", "has no 'Absent'"),
        ("- gymnasium", "must be a mapping"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(folder: Path, text: str, problem: str) -> None:
    with pytest.raises(SetupError, match=problem) as error:
        list(read_rows(_yaml(folder, text)))
    assert "environment.yaml" in str(error.value) or "mine.py" in str(error.value)


@pytest.mark.parametrize("library", ["openenv", "textarena", "verifiers"])
def test_a_library_that_is_not_installed_is_named_with_its_extra(library: str) -> None:
    with pytest.raises(SetupError, match=rf"pip install 'treadle-tools\[{library}\]'"):
        list(read_rows(f"{library}:something"))
