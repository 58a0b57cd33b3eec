"""Tests of the rollout's bookkeeping; what servers do is tested end to end."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from treadle.agent_loop import (
    AgentTask,
    LoopRegistry,
    Message,
    RequestContext,
    RewardError,
    SamplingParams,
    Services,
    ToolError,
    Trajectory,
)
from treadle.agent_loop.testing import ScriptedGenerator
from treadle.trainer.config.load import load_config
from treadle.trainer.rollout.rollout import Rollout


def _tasks(count: int) -> list[AgentTask]:
    return [
        AgentTask(
            task_id="train/0",
            sample_index=0,
            rollout_index=index,
            loop="careless",
            messages=(Message(role="user", content="hi"),),
        )
        for index in range(count)
    ]


@dataclass(slots=True)
class Story:
    """How often servers will die, and what was attempted. It takes the pool's place too."""

    num_deaths: int
    num_attempts: int = 0

    async def ensure_healthy(self) -> bool:
        if not self.num_attempts or not self.num_deaths:
            return False
        self.num_deaths -= 1
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing(Rollout):
    """Every attempt fails, every second one for a reason that may pass."""

    story: Story

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
        servers=cast(Any, story),
        renderer=unused,
        rules=unused,
        reward=unused,
        story=story,
    )
    tasks = _tasks(4)
    ends: list[Trajectory] = []
    trajectories = await rollout.run(
        tasks,
        SamplingParams(max_tokens=1),
        min_weight_version=0,
        on_end=ends.append,
    )
    assert [trajectory.task for trajectory in trajectories] == tasks
    assert story.num_attempts == num_attempts
    assert sorted(t.task.rollout_index for t in ends) == [t.rollout_index for t in tasks]


class Careless:
    """Makes one request, does not finish its session, and fails for good."""

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        session_id = str(task.rollout_index)
        request = RequestContext(request_id="r", session_id=session_id, deadline=services.deadline)
        await services.generator.generate((1,), services.sampling, request=request)
        return Trajectory.failed(task, RewardError("no answer"))


@dataclass
class Pool:
    """A pool whose servers all die when a test says so, and are restarted at once."""

    generator: ScriptedGenerator
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    live: tuple[None, ...] = (None,)

    async def ensure_healthy(self) -> bool:
        died = self.lost.is_set()
        self.lost.clear()
        if died:
            self.generator.release()
        return died

    async def wait_until_all_ended(self) -> None:
        await self.lost.wait()


def _rollout(pool: Pool) -> Rollout:
    rules = SimpleNamespace(loops=LoopRegistry({"careless": Careless()}), tools={}, interactions={})
    return Rollout(
        config=load_config([], ["model.path=/m", "data.train_files=/t.jsonl"]).config,
        servers=cast(Any, pool),
        renderer=cast(Any, None),
        rules=cast(Any, rules),
        reward=lambda _: 0.0,
    )


@pytest.mark.asyncio
async def test_sessions_that_a_loop_left_open_are_finished_with_the_batch() -> None:
    pool = Pool(ScriptedGenerator([[2], [2]]))
    await _rollout(pool).run(
        _tasks(2), SamplingParams(max_tokens=1), min_weight_version=0, on_end=lambda _: None
    )
    assert sorted(pool.generator.finished_sessions) == ["0", "1"]


@pytest.mark.asyncio
async def test_tasks_in_flight_when_no_server_is_left_are_attempted_again() -> None:
    pool = Pool(ScriptedGenerator([[2], [2]]))
    pool.generator.hold()
    running = asyncio.create_task(
        _rollout(pool).run(
            _tasks(2), SamplingParams(max_tokens=1), min_weight_version=0, on_end=lambda _: None
        )
    )
    await pool.generator.until_running(2)
    pool.lost.set()
    assert len(await running) == 2
    assert pool.generator.num_aborted == 2
    assert len(pool.generator.requests) == 4
    assert sorted(pool.generator.finished_sessions) == ["0", "0", "1", "1"]
