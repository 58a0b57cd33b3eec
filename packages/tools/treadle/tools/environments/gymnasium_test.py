"""Text environments with Gymnasium's interface, played by a script."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest

from treadle.agent_loop import (
    AgentTask,
    Drop,
    LoopLimits,
    LoopRegistry,
    Message,
    RolloutRunner,
    SamplingParams,
    Services,
    StopReason,
    Trajectory,
)
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator
from treadle.tools.environments import read_rows
from treadle.tools.environments.gymnasium import GymnasiumLoop

_CODE = '''
log = []

class Maze:
    """The word "go" leads out in two steps; "fall" breaks it."""

    def reset(self, *, seed=None):
        log.append(f"reset {seed}")
        self.steps = 0
        return "Which way?", {}

    def step(self, action):
        if action == "fall":
            raise RuntimeError("you fell")
        self.steps += action == "go"
        out = self.steps == 2
        return f"{self.steps} steps", 0.5 * (action == "go"), out, False, {}

    def close(self):
        log.append("close")

class Async(Maze):
    async def reset(self, *, seed=None):
        return super().reset(seed=seed)

    async def step(self, action):
        return super().step(action)

class Numbered(Maze):
    """Takes the numbers of words, and draws itself."""

    render_mode = "ansi"

    def reset(self, *, seed=None):
        self.at = 0
        return self.at, {}

    def step(self, action):
        assert isinstance(action, int)
        self.at += (-1, 1)[action]
        return self.at, float(self.at == 2), self.at == 2, False, {}

    def render(self):
        return f"at {self.at}"
'''


@pytest.fixture
def code(tmp_path: Path) -> Path:
    file = tmp_path / "maze.py"
    file.write_text(_CODE)
    return file


def _run(
    row: Mapping[str, object], *replies: str, max_assistant_turns: int | None = None
) -> Trajectory:
    task = AgentTask(
        task_id="t",
        sample_index=0,
        rollout_index=0,
        loop="gym",
        messages=(
            Message(role="system", content="Find out."),
            Message(role="user", content="unused"),
        ),
        fields=row,
    )
    ended: list[Trajectory] = []

    async def keep(trajectory: Trajectory) -> None:
        ended.append(trajectory)

    runner = RolloutRunner(
        LoopRegistry({"gym": GymnasiumLoop()}),
        Services(
            generator=ScriptedGenerator(replies),
            renderer=ByteRenderer(),
            limits=LoopLimits(max_response_tokens=200, max_assistant_turns=max_assistant_turns),
            sampling=SamplingParams(max_tokens=50),
        ),
        max_in_flight=1,
        deadline_s=60.0,
        failure_policy=Drop(),
    )
    asyncio.run(runner.run([task], keep))
    return ended[0]


def _row(code: Path, name: str, actions: str = "") -> Mapping[str, object]:
    file = code.with_suffix(".yaml")
    file.write_text(f"gymnasium: {code}:{name}\nrows: 1\nfirst_seed: 5\n{actions}")
    return next(columns for _, columns in read_rows(file))


@pytest.mark.parametrize("name", ["Maze", "Async"])
def test_an_episode_is_a_conversation_and_its_rewards_add_up(code: Path, name: str) -> None:
    row = _row(code, "Maze")
    assert isinstance(row["extra_info"], dict)
    row["extra_info"]["environment"]["gymnasium"] = f"{code}:{name}"
    trajectory = _run(row, "go", "stay", "go")
    assert (trajectory.reward, trajectory.stop) == (1.0, StopReason.FINISHED)
    assert [(m.role, m.content) for m in trajectory.messages] == [
        ("system", "Find out."),
        ("user", "Which way?"),
        ("assistant", "go"),
        ("user", "1 steps"),
        ("assistant", "stay"),
        ("user", "1 steps"),
        ("assistant", "go"),
    ]
    metrics = {metric.name: metric.value for metric in trajectory.metrics}
    assert metrics["environment/finished"] == 1.0
    assert len(trajectory.samples) == 1


def test_an_episode_that_a_limit_ends_keeps_what_it_earned(code: Path) -> None:
    trajectory = _run(_row(code, "Maze"), "go", "stay", max_assistant_turns=2)
    assert (trajectory.reward, trajectory.stop) == (0.5, StopReason.ASSISTANT_TURNS)
    assert trajectory.messages[-1].content == "stay"  # nothing is said that nobody answers
    assert {m.name: m.value for m in trajectory.metrics}["environment/finished"] == 0.0
    long = _run(_row(code, "Maze"), "go" * 200)
    assert (long.reward, long.stop) == (0.0, StopReason.TURN_LENGTH)


def test_an_environment_that_breaks_fails_its_trajectory_and_is_closed(code: Path) -> None:
    from treadle.agent_loop import load_import_path

    trajectory = _run(_row(code, "Maze"), "fall")
    assert "RuntimeError: you fell" in str(trajectory.error)
    log = cast(list[str], load_import_path(f"{code}:log", "log"))
    assert log[-2:] == ["reset 5", "close"]


def test_words_stand_for_the_numbers_of_actions(code: Path) -> None:
    row = _row(code, "Numbered", "actions: [left, Right]\n")
    trajectory = _run(row, "left or right", "nowhere, brightly", "RIGHT.")
    assert (trajectory.reward, trajectory.stop) == (1.0, StopReason.FINISHED)
    assert [m.content for m in trajectory.messages if m.role == "user"] == [
        "at 0",
        "at 1",
        "Answer with one of: left, Right.",
    ]
