import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from treadle.agent_loop import (
    AgentTask,
    LoopError,
    Message,
    RewardError,
    SetupError,
    StopReason,
    Trajectory,
    TrajectoryTimeoutError,
)
from treadle.tools.rewards import WeightedRewards, from_function, resolve_all, weighed
from treadle.tracing import Metric, Reduce


def correct(trajectory: Trajectory) -> float:
    return float(trajectory.final_text == "42")


def short(trajectory: Trajectory) -> float | None:
    return None if trajectory.final_text == "?" else 1 / len(trajectory.final_text)


def never(trajectory: Trajectory) -> None:
    return None


def longest(trajectories: Sequence[Trajectory]) -> list[float]:
    most = max(len(t.final_text) for t in trajectories)
    return [float(len(t.final_text) == most) for t in trajectories]


async def later(trajectories: Sequence[Trajectory]) -> list[float | None]:
    return [None if t.final_text == "?" else 0.5 for t in trajectories]


def fails(trajectories: Sequence[Trajectory]) -> list[float]:
    return [1 / 0 for _ in trajectories]


async def hangs(trajectories: Sequence[Trajectory]) -> list[float]:
    await asyncio.Event().wait()
    return []


def saying(text: str, number: int = 0) -> Trajectory:
    asked = (Message(role="user", content="how many?"),)
    task = AgentTask(task_id="r", sample_index=0, rollout_index=number, loop="x", messages=asked)
    messages = (*asked, Message(role="assistant", content=text))
    return Trajectory(task=task, samples=(), messages=messages, stop=StopReason.FINISHED)


def of(*functions: Callable[..., object], **weights: float) -> WeightedRewards:
    found = weighed([(f.__name__, partial(from_function, f)) for f in functions], weights)
    assert isinstance(found, WeightedRewards)
    return found


async def compared(reward: WeightedRewards, *texts: str, limit_s: float = 60) -> list[Trajectory]:
    """As a rollout: each alone, then the group, with a member that failed."""
    scored = [saying(text, number) for number, text in enumerate(texts)]
    for number, each in enumerate(scored):
        score = await reward(each)
        scored[number] = replace(each, reward=score.value, metrics=score.metrics)
    failed = Trajectory.failed(saying("").task, LoopError("it broke"))
    done = await reward.of_group([*scored, failed], deadline_s=limit_s)
    assert done[-1] is failed
    return done[:-1]


@pytest.mark.asyncio
async def test_results_are_added_by_weight_and_each_has_a_metric_without_it() -> None:
    score = await of(correct, short, short=0.2)(saying("42"))
    assert score.value == 1 + 0.2 * 0.5
    assert score.metrics[:2] == (Metric("reward/correct", 1.0), Metric("reward/short", 0.5))
    assert score.metrics[2:] == (Metric("rewards/summed", 2, Reduce.SUM),)
    assert (await of(correct, correct=2.0)(saying("42"))).metrics[1:] == (
        Metric("rewards/summed", 1, Reduce.SUM),
    )
    assert len((await of(correct, correct=1.0)(saying("42"))).metrics) == 1


@pytest.mark.asyncio
async def test_none_is_for_a_trajectory_that_a_reward_does_not_judge() -> None:
    score = await of(correct, short)(saying("?"))
    assert (score.value, score.metrics[0]) == (0.0, Metric("reward/correct", 0.0))
    with pytest.raises(RewardError, match=r"'r': every reward returned None \(never, short\)"):
        await of(never, short)(saying("?"))
    alone = weighed([("never", partial(from_function, never))], {})
    with pytest.raises(RewardError, match="the reward never: the reward is None"):
        alone(saying("?"))


@pytest.mark.asyncio
async def test_a_group_is_compared_when_all_have_ended_without_those_that_failed() -> None:
    first, second = await compared(of(correct, longest, later, longest=2.0), "42", "?")
    assert (first.reward, second.reward) == (1 + 2 * 1 + 0.5, 0.0)
    names = ["reward/correct", "reward/longest", "reward/later"]
    assert [m.name for m in first.metrics if m.name.startswith("reward/")] == names
    assert [m.name for m in second.metrics if m.name.startswith("reward/")] == names[:2]
    assert sum(m.value for m in first.metrics if m.name == "rewards/summed") == 3
    assert [t.reward for t in await compared(of(longest), "1", "23")] == [0.0, 1.0]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("reward", "why"),
    [(fails, "'r': ZeroDivisionError"), (hangs, "within 0.01 s"), (never, "None")],
)
async def test_all_of_a_group_fail_with_the_reward_that_compares_them(
    reward: Callable[..., object], why: str
) -> None:
    given = (reward, later) if reward is never else (reward,)
    for each in await compared(of(*given), "?", "?", limit_s=0.01):
        # As of any trajectory that is late: it is no bug of the reward.
        kind = TrajectoryTimeoutError if reward is hangs else RewardError
        with pytest.raises(kind, match=why):
            assert each.error is not None
            raise each.error


@pytest.mark.asyncio
async def test_those_of_a_file_run_in_processes_and_a_late_one_gives_its_score(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "def alone(trajectory, limit=0): return {'score': 1.0, 'pid': os.getpid()}\n"
        "def together(trajectories): return [len(trajectories)] * len(trajectories)\n"
        "def stuck(trajectories):\n    while True: pass\n"
    )
    names = [f"{tmp_path}/mine.py:{name}" for name in ("alone", "together", "gsm8k")]
    named = partial(resolve_all, weights={}, mode=None, timeout_s=None, timeout_score=-1.0)
    reward = named(names[:2])
    assert isinstance(reward, WeightedRewards)
    first, second = await compared(reward, "a", "b")
    assert first.reward == second.reward == 3.0
    stuck = named([f"{tmp_path}/mine.py:stuck"], timeout_s=0.2)
    assert isinstance(stuck, WeightedRewards)
    late, _ = await compared(stuck, "a", "b")
    assert late.reward == -1.0
    assert [(m.name, m.value) for m in late.metrics[1:]] == [("reward/timeouts", 1)]


def test_names_and_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SetupError, match=r"reward.weights has 'shrt'.*did you mean 'short'"):
        of(correct, short, shrt=0.2)
    with pytest.raises(SetupError, match="two rewards are named 'short', of short, short"):
        of(short, short)


@pytest.mark.parametrize("names", ["one", "one other"])
def test_a_mode_that_no_reward_reads_is_refused(tmp_path: Path, names: str) -> None:
    (tmp_path / "mine.py").write_text("def one(trajectory): return 1.0\nother = one\n")
    given = [f"{tmp_path}/mine.py:{name}" for name in names.split()]
    with pytest.raises(SetupError, match=r"mine\.py:one' has no modes, .* mode 'strict'"):
        resolve_all(given, weights={}, mode="strict", timeout_s=None, timeout_score=0.0)
