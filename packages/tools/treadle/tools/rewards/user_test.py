from collections.abc import Mapping
from pathlib import Path

import pytest

from treadle.agent_loop import (
    AgentTask,
    Message,
    RewardError,
    SetupError,
    StopReason,
    Trajectory,
)
from treadle.tools import rewards


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
        "    return {'score': float(solution_str == '#### ' + ground_truth), 'acc': True}\n"
        "def nothing(trajectory): return None\n"
        "def infinite(trajectory): return float('inf')\n"
        "def two(a, b): return 0.0\n"
        "three = 3\n"
    )
    return path


def test_a_function_of_a_file_or_module_is_called_with_the_trajectory(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rewards.load(f"{mine}:length")(make_trajectory()) == 7.0
    assert rewards.load(f"{mine}:half")(make_trajectory()) == 0.5
    monkeypatch.syspath_prepend(str(mine.parent))
    assert rewards.resolve("mine:length")(make_trajectory()) == 7.0


@pytest.mark.asyncio
async def test_an_async_function_is_awaited_by_the_runner(mine: Path) -> None:
    result = rewards.load(f"{mine}:later")(make_trajectory())
    assert not isinstance(result, float)
    assert await result == 0.5


def test_verls_signature_is_understood(mine: Path) -> None:
    fields = {
        "data_source": "openai/gsm8k",
        "reward_model": {"ground_truth": "42"},
        "extra_info": {"index": 1},
    }
    assert rewards.load(f"{mine}:compute_score")(make_trajectory(fields=fields)) == 1.0


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("length", "neither path.py:function nor module:function"),
        ("{mine}:", "neither path.py:function nor module:function"),
        ("{mine}.missing.py:length", "does not exist"),
        ("no_such_module_at_all:f", "No module named 'no_such_module_at_all'"),
        (
            "{mine}:three",
            "has no function 'three'; it has: compute_score, dataclass, half, infinite",
        ),
        ("{mine}:missing", "has no function 'missing'"),
        ("{mine}:two", r"takes \(a, b\); it must take \(trajectory\) or verl's"),
    ],
)
def test_what_cannot_be_resolved_fails_at_start(mine: Path, reference: str, why: str) -> None:
    with pytest.raises(SetupError, match=why):
        rewards.load(reference.replace("{mine}", str(mine)))


def test_a_file_that_does_not_load_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    with pytest.raises(SetupError, match=r"broken\.py: ModuleNotFoundError: No module named"):
        rewards.load(f"{tmp_path}/broken.py:f")


@pytest.mark.parametrize(("name", "value"), [("nothing", "None"), ("infinite", "inf")])
def test_a_result_that_is_no_finite_number_is_blamed_on_the_function(
    mine: Path, name: str, value: str
) -> None:
    with pytest.raises(RewardError, match=rf"mine\.py:{name} returned {value}; it must"):
        rewards.load(f"{mine}:{name}")(make_trajectory())
