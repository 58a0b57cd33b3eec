"""The mistakes in a user's own code that a dry run finds; each of them once passed it."""

import json
import re
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from treadle.agent_loop import SetupError
from treadle.trainer.checkpoint.run_directory import RunDirectory
from treadle.trainer.config.load import load_config
from treadle.trainer.demo import DEMO
from treadle.trainer.own_code import collect
from treadle.trainer.preflight import CheckedRun, check_run, trial
from treadle.trainer.problems import SeveralProblems

_CODE = """
import asyncio
import threading
from treadle.agent_loop import ToolSpec

_SCHEMA = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}

def typo(trajectory):
    return trajectry.final_text == "42"

def nan(trajectory, answer="42"):
    assert trajectory.samples[-1].num_sampled_tokens and trajectory.messages[-1].content
    return float("nan")

def text(trajectory): return "1.0"

def nothing(trajectory): return None

def group(trajectories): return [0.0]

async def later(trajectory): raise RuntimeError("the service is down")

def right(trajectory): return 1.0

class Guess:
    def __init__(self, config):
        self.spec = ToolSpec(name="guess", description="Guess.", parameters={**_SCHEMA, **config})

    async def open(self, task):
        self.number = task.fields["extra_info"]["number"]
        return self

    async def aclose(self): ...

class Keeps(Guess):
    loop = None

    async def open(self, task):
        loop = asyncio.get_running_loop()
        assert self.loop in (None, loop), "of another event loop"
        self.loop = loop
        return self

made = Keeps({})

class Blocks(Guess):
    async def open(self, task):
        threading.Event().wait()

class Game:
    def guess(self, number: int) -> str:
        '''Guess.'''
        return "right"

    def reward(self):
        return self.won
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "game.py"
    path.write_text(_CODE)
    return path


def checked(
    tmp_path: Path, *settings: str, reward: object = None, resumes: bool = False, **row: object
) -> CheckedRun:
    """Checks a run on one row."""
    columns = {"prompt": "Guess.", "agent_name": "tool_agent", **row}
    (tmp_path / "rows.jsonl").write_text(json.dumps(columns) + "\n")
    given = (f"data.train_files={tmp_path}/rows.jsonl", "data.val_files=[]", *settings)
    quick = ("schedule.val_every=null", "data.prompts_per_step=1", "rollout.samples_per_prompt=2")
    config = load_config([DEMO], [*given, *quick]).config
    own = collect(config, reward=reward, tools=(), loops={}, on_step=None)  # type: ignore[arg-type]
    return check_run(config, tmp_path / "run", own, resumes=resumes)


def check(tmp_path: Path, *settings: str, **given: Any) -> str:
    """Returns what is wrong with a run on one row; "" if nothing is."""
    try:
        checked(tmp_path, *settings, **given)
    except (SetupError, SeveralProblems) as error:
        return str(error)
    return ""


def test_a_reward_that_raises_or_returns_no_number_is_found(tmp_path: Path, code: Path) -> None:
    names = ", ".join(f"{code}:{name}" for name in ("typo", "nan", "text", "group", "later"))
    found = check(tmp_path, f"reward.name=[{names}]")
    for why in (
        rf"called with 'The answer is 42.' for {tmp_path}/rows\.jsonl, line 1: .*typo: "
        rf"NameError: name 'trajectry' is not defined \({code}:9, in typo\)\. Correct it, or set",
        "nan: .*the reward is nan; it must be a finite number",
        "text: .*the reward is '1.0'; it must be",
        "group: .*returned .*for 2 trajectories",
    ):
        assert re.search(why, found)
    assert "service" not in found
    assert "the reward is None" in check(tmp_path, f"reward.name={code}:nothing")
    assert not check(tmp_path, f"reward.name=[{names}]", "agent.try_once=false")


def test_the_function_of_a_script_is_tried_too(tmp_path: Path) -> None:
    assert "the reward is None" in check(tmp_path, reward=lambda trajectory: None)
    assert not check(tmp_path, reward=lambda trajectory: 1.0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ("{propertys: {}}", "has 'propertys', which .*did you mean 'properties'"),
        ("{properties: {number: {type: integr}}}", r"number\.type is no JSON Schema: 'integr'"),
        ("{required: [nmber]}", "required has 'nmber', which is no property, did you mean"),
        (
            "{}",
            r"line 1: tool 'guess': KeyError: 'extra_info' .*game\.py:\d+, in open",
        ),
    ],
)
def test_a_tool_with_a_wrong_schema_or_a_row_without_its_value_is_found(
    tmp_path: Path, code: Path, changes: str, why: str
) -> None:
    tools = tmp_path / "tools.yaml"
    tools.write_text(f"tools:\n  - class_name: game.py:Guess\n    config: {changes}\n")
    own = (f"agent.tool_catalogue={tools}", f"reward.name={code}:right")
    assert re.search(why, check(tmp_path, *own))
    if changes == "{}":
        assert not check(tmp_path, *own, extra_info={"number": 3})


def test_the_reward_of_a_class_is_tried(tmp_path: Path, code: Path) -> None:
    found = check(tmp_path, f"agent.tool_catalogue={code}:Game")
    assert re.search(r"'Game' object has no attribute 'won' \(.*game\.py:\d+, in reward\)", found)


@pytest.mark.parametrize("entry", ["class_name: game.py:Keeps", "function: game.py:made"])
@pytest.mark.asyncio
async def test_the_tool_of_the_run_is_not_opened(tmp_path: Path, code: Path, entry: str) -> None:
    tools = tmp_path / "tools.yaml"
    tools.write_text(f"tools:\n  - {entry}\n")
    run = checked(tmp_path, f"agent.tool_catalogue={tools}", f"reward.name={code}:right")
    (task,) = run.inputs.train[0].tasks(samples=1, seed=0, step=0)
    await run.inputs.rules.tools["guess"].open(task)


def test_what_is_slow_is_left_to_the_run(
    tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_LIMIT_S", 0.1)
    tools = tmp_path / "tools.yaml"
    tools.write_text("tools:\n  - class_name: game.py:Blocks\n")
    assert not check(
        tmp_path, f"agent.tool_catalogue={tools}", reward=lambda trajectory: Event().wait()
    )


def test_code_that_has_run_is_not_tried_again(tmp_path: Path, code: Path) -> None:
    assert not check(tmp_path, f"reward.name={code}:typo", resumes=True)
    config = checked(tmp_path, f"reward.name={code}:right").config
    with RunDirectory(tmp_path / "run") as directory:
        directory.write_config(config.model_dump(mode="json"))
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert not check(tmp_path, f"reward.name={code}:typo")


def test_a_class_is_no_function_and_a_function_no_class(tmp_path: Path, code: Path) -> None:
    assert "which is not a function" in check(tmp_path, f"reward.name={code}:Game")
    tools = tmp_path / "tools.yaml"
    tools.write_text("tools:\n  - class_name: game.py:right\n")
    found = check(tmp_path, f"agent.tool_catalogue={tools}", f"reward.name={code}:right")
    assert "game.py:right is not a class" in found
