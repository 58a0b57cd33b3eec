from collections.abc import Awaitable, Mapping
from pathlib import Path

import pytest

from treadle.agent_loop import (
    AgentTask,
    Message,
    RewardError,
    Score,
    SetupError,
    StopReason,
    Trajectory,
)
from treadle.tools import rewards
from treadle.tools.rewards import user
from treadle.tools.rewards.user import load
from treadle.tracing import Metric


def make_trajectory(*, fields: Mapping[str, object] | None = None) -> Trajectory:
    question = Message(role="user", content="How many?")
    task = AgentTask(
        task_id="train/7",
        sample_index=7,
        rollout_index=0,
        loop="single_turn_agent",
        messages=(question,),
        fields=fields or {},
    )
    return Trajectory(
        task=task,
        samples=(),
        messages=(question, Message(role="assistant", content="#### 42")),
        stop=StopReason.FINISHED,
        assistant_turns=1,
    )


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from fractions import Fraction\n"
        "@dataclass\n"
        "class Settings: weight: float = 1.0\n"
        "def half(trajectory): return Fraction(1, 2)\n"
        "def length(trajectory): return len(trajectory.final_text)\n"
        "async def later(trajectory): return 0.5\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert extra_info == {'index': 1, 'num_turns': 2}, extra_info\n"
        "    right = solution_str == '#### ' + ground_truth\n"
        "    return {'score': float(right), 'acc': True, 'pred': solution_str[5:]}\n"
        "def nothing(trajectory): return None\n"
        "def infinite(trajectory): return float('inf')\n"
        "def two(completions, answer): return 0.0\n"
        "def near(trajectory, answer, unit='m', **kwargs):\n"
        "    return (trajectory.final_text == f'#### {answer}') + len(unit) + len(kwargs)\n"
        "def longest(trajectories, answer):\n"
        "    return [len(t.final_text) * answer for t in trajectories][:2]\n"
        "three = 3\n"
    )
    return path


async def score(name: str) -> Score:
    """As the runner does with a reward that a configuration names."""
    result = rewards.resolve(name)(make_trajectory())
    assert isinstance(result, Awaitable)
    return Score.of(await result)


@pytest.mark.asyncio
async def test_a_function_of_a_file_or_module_is_called_with_the_trajectory(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(f"{mine}:length")(make_trajectory()) == Score(value=7.0)
    assert load(f"{mine}:half")(make_trajectory()) == Score(value=0.5)
    monkeypatch.syspath_prepend(str(mine.parent))
    assert await score("mine:length") == Score(value=7.0)


@pytest.mark.asyncio
async def test_an_async_function_is_awaited_by_the_runner(mine: Path) -> None:
    result = load(f"{mine}:later")(make_trajectory())
    assert isinstance(result, Awaitable)
    assert await result == Score(value=0.5)


def test_verls_signature_is_understood(mine: Path) -> None:
    fields = {
        "data_source": "openai/gsm8k",
        "reward_model": {"ground_truth": "42"},
        "extra_info": {"index": 1},
    }
    score = load(f"{mine}:compute_score")(make_trajectory(fields=fields))
    assert score == Score(value=1.0, metrics=(Metric("reward/acc", 1.0),), answer="42")


@pytest.mark.asyncio
async def test_a_reward_of_an_installed_package_is_known_by_its_name(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(mine.parent))
    offered = mine.parent / "mine-1.0.dist-info"
    offered.mkdir()
    (offered / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (offered / "entry_points.txt").write_text(
        f"[{user.ENTRY_POINTS}]\nbrevity = mine:length\nnonsense = mine:absent\n"
    )
    assert await score("brevity") == Score(value=7.0)
    with pytest.raises(SetupError, match=r"'nonsense' = 'mine:absent'.*AttributeError"):
        rewards.resolve("nonsense")
    with pytest.raises(SetupError, match="no reward 'brevit', did you mean 'brevity'"):
        rewards.resolve("brevit")


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("length", "neither path.py:name nor module:name"),
        ("{mine}:", "neither path.py:name nor module:name"),
        ("{mine}.missing.py:length", "does not exist"),
        ("no_such_module_at_all:f", "from no_such_module_at_all: no such module is installed"),
        (
            "{mine}:three",
            "three' is 3, which is not a function",
        ),
        (
            "{mine}:missing",
            "has no 'missing'; it has: Fraction, Settings, annotations, compute_score",
        ),
        (
            "{mine}:two",
            r"takes \(completions, answer\); it must .* or verl's",
        ),
        ("{mine}:Settings", "which is not a function"),
    ],
)
def test_what_cannot_be_resolved_fails_at_start(mine: Path, reference: str, why: str) -> None:
    with pytest.raises(SetupError, match=why):
        load(reference.replace("{mine}", str(mine)))


def test_a_file_that_ends_the_program_when_it_is_imported_says_so(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("def score(trajectory): return 0.0\nexit(0)\n")
    with pytest.raises(
        SetupError,
        match=r"SystemExit: 0 \(.*script\.py:2, in <module>\); it ends .* below `if __name__ ==",
    ):
        load(f"{path}:score")


def test_a_file_that_does_not_load_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    with pytest.raises(SetupError, match=r"broken\.py: ModuleNotFoundError: No module named"):
        load(f"{tmp_path}/broken.py:f")


@pytest.mark.parametrize(("name", "value"), [("nothing", "None"), ("infinite", "inf")])
def test_a_result_that_is_no_finite_number_is_blamed_on_the_function(
    mine: Path, name: str, value: str
) -> None:
    with pytest.raises(RewardError, match=rf"mine\.py:{name}: the reward is {value}; it must"):
        load(f"{mine}:{name}")(make_trajectory())


def test_further_parameters_are_columns_of_the_row_or_of_its_extra_info(mine: Path) -> None:
    near = load(f"{mine}:near")
    fields = {"answer": 42, "extra_info": {"unit": "km"}}
    assert near(make_trajectory(fields=fields)) == Score(value=1 + len("km") + len(["extra_info"]))
    with pytest.raises(SetupError, match=r"near takes answer, and the row has none.*has: level"):
        near.check_row({"level": 3})


@pytest.mark.parametrize("name", ["prompt", "images"])
def test_a_column_that_is_in_the_messages_is_no_argument(name: str) -> None:
    read = {"trajectory": None}
    exec(f"def reward(trajectory, {name}=None): return float({name} == 'in')", read)
    reward = rewards.from_function(read["reward"])  # type: ignore[arg-type]
    with pytest.raises(SetupError, match=f"takes {name}, a column .* trajectory.task.messages"):
        reward.check_row({name: "?"})
    reward.check_row({name: "?", "extra_info": {name: "in"}})
    assert reward(make_trajectory(fields={"extra_info": {name: "in"}})) == Score(value=1.0)


def test_a_reward_of_a_group_gets_all_of_a_row_and_returns_one_result_for_each(mine: Path) -> None:
    longest, trajectory = load(f"{mine}:longest"), make_trajectory(fields={"answer": 2})
    assert longest((trajectory, trajectory)) == [Score(value=14.0), Score(value=14.0)]
    with pytest.raises(RewardError, match=r"longest returned \[14, 14\] for 3 trajectories"):
        longest((trajectory,) * 3)
