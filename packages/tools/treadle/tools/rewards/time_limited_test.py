import os
from functools import partial
from pathlib import Path

import pytest

from treadle.agent_loop import AgentTask, Message, RewardError, Score, StopReason, Trajectory
from treadle.tools.rewards import time_limited
from treadle.tools.rewards.time_limited import TimeLimitedReward
from treadle.tools.rewards.user import load
from treadle.tracing import Metric, Reduce


def timeouts(count: int) -> Metric:
    return Metric("reward/timeouts", count, Reduce.SUM)


@pytest.fixture
def timeout_s() -> float:
    """Only a test whose reward never ends waits so long."""
    return 60.0


@pytest.fixture
def reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> TimeLimitedReward:
    path = tmp_path / "mine.py"
    path.write_text(
        "import os\n"
        "async def mine(trajectory):\n"
        "    text = trajectory.final_text\n"
        "    while text == 'for ever': pass\n"
        "    if text == 'die': os._exit(3)\n"
        "    return {'score': 1.0 / len(text), 'pid': os.getpid()}\n"
    )
    make = partial(load, f"{path}:mine")
    monkeypatch.setattr(time_limited, "_PROCESSES", 1)
    return TimeLimitedReward(make, name="mine", timeout_s=timeout_s, timeout_score=-1.0)


def saying(text: str) -> Trajectory:
    question = Message(role="user", content="?")
    task = AgentTask(
        task_id="row-1", sample_index=1, rollout_index=0, loop="x", messages=(question,)
    )
    return Trajectory(
        task=task,
        samples=(),
        messages=(question, Message(role="assistant", content=text)),
        stop=StopReason.FINISHED,
    )


def pid(score: Score) -> float:
    return next(metric.value for metric in score.metrics if metric.name == "reward/pid")


@pytest.mark.asyncio
async def test_a_reward_is_scored_in_another_process_which_lasts(reward: TimeLimitedReward) -> None:
    first, second = await reward(saying("ab")), await reward(saying("abcd"))
    assert (first.value, second.value) == (0.5, 0.25)
    assert pid(first) == pid(second) != os.getpid()
    assert first.metrics[-1] == timeouts(0)


@pytest.mark.parametrize("timeout_s", [5.0])
@pytest.mark.asyncio
async def test_one_that_takes_too_long_is_killed_and_counted(
    reward: TimeLimitedReward, caplog: pytest.LogCaptureFixture
) -> None:
    assert await reward(saying("for ever")) == Score(value=-1.0, metrics=(timeouts(1),))
    assert "task row-1: the reward mine did not end within 5 s; the trajectory gets -1" in (
        caplog.text
    )
    assert (await reward(saying("ab"))).value == 0.5


@pytest.mark.asyncio
async def test_what_the_reward_raises_and_how_its_process_dies_are_told(
    reward: TimeLimitedReward,
) -> None:
    with pytest.raises(RewardError, match="the reward mine: ZeroDivisionError: float division"):
        await reward(saying(""))
    with pytest.raises(RewardError, match="the reward mine: its process died with exit code 3"):
        await reward(saying("die"))
    assert (await reward(saying("ab"))).value == 0.5


def test_a_limit_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="timeout_s must be above 0, got 0"):
        TimeLimitedReward(partial(load, "json:loads"), name="x", timeout_s=0)
