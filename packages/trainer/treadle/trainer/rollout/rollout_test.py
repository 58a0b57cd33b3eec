"""Tests of the rollout's bookkeeping; what replicas do is tested end to end."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

from treadle.agent_loop import (
    AgentTask,
    Message,
    RewardError,
    SamplingParams,
    ToolError,
    Trajectory,
)
from treadle.trainer.config.load import load_config
from treadle.trainer.rollout.rollout import Rollout, needed_capabilities


@dataclass(slots=True)
class Story:
    """How often replicas will die, and what was attempted."""

    num_deaths: int
    num_attempts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing(Rollout):
    """Every attempt fails, every second one for a reason that may pass."""

    story: Story

    async def heal(self) -> bool:
        if not self.story.num_attempts or not self.story.num_deaths:
            return False
        self.story.num_deaths -= 1
        return True

    async def _run_until_lost(
        self,
        tasks: Sequence[AgentTask],
        sampling: SamplingParams,
        sink: Callable[[Trajectory], Awaitable[None]],
        min_weight_version: int,
    ) -> None:
        self.story.num_attempts += len(tasks)
        for task in tasks:
            error = (ToolError if task.rollout_index % 2 else RewardError)("it is down")
            await sink(Trajectory.failed(task, error))


@pytest.mark.asyncio
@pytest.mark.parametrize(("num_deaths", "num_attempts"), [(0, 4), (2, 8)])
async def test_each_trajectory_ends_once_however_often_it_was_attempted(
    num_deaths: int, num_attempts: int
) -> None:
    story, unused = Story(num_deaths), cast(Any, None)
    rollout = Failing(
        config=unused,
        replicas=unused,
        renderer=unused,
        requirements=unused,
        rules=unused,
        reward=unused,
        republish=unused,
        story=story,
    )
    tasks = [
        AgentTask(
            task_id="train/0",
            sample_index=0,
            rollout_index=index,
            loop="tool_agent",
            messages=(Message(role="user", content="hi"),),
        )
        for index in range(4)
    ]
    ends: list[None] = []
    trajectories = await rollout.run(
        tasks,
        SamplingParams(max_tokens=1),
        min_weight_version=0,
        on_end=lambda: ends.append(None),
    )
    assert [trajectory.task for trajectory in trajectories] == tasks
    assert story.num_attempts == num_attempts
    assert len(ends) == len(tasks)


def test_servers_must_be_able_to_do_what_the_configuration_asks_of_them() -> None:
    paths = ["model.path=/m", "data.train_files=/t.jsonl"]
    plain = load_config([], paths).config
    assert needed_capabilities(plain) == {"sampled_logprobs", "inline_transport"}
    asked = ("sync.transport=shared_memory", "sync.in_place=true", "rollout.release_memory=true")
    assert needed_capabilities(load_config([], [*paths, *asked]).config) == {
        "sampled_logprobs",
        "shared_memory_transport",
        "in_place_update",
        "release_memory",
    }
    kept = load_config([], [*paths, "sync.in_flight=continue"]).config
    assert "in_flight_continue" in needed_capabilities(kept)
