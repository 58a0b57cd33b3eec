"""The continuous rollout, with loops that end when a test says so and servers that die likewise."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from treadle.agent_loop import (
    AgentTask,
    EngineFailedError,
    LoopRegistry,
    Message,
    RewardError,
    SamplingParams,
    Services,
    StopReason,
    Trajectory,
)
from treadle.agent_loop.testing import ScriptedGenerator
from treadle.trainer.config.load import load_config
from treadle.trainer.rollout.continuous import ContinuousRollout
from treadle.trainer.rollout.outages import OutageError
from treadle.trainer.rollout.rollout import Rollout
from treadle.trainer.rollout.rotation import Routes

_MAX_IN_FLIGHT = 3


@dataclass
class Loop:
    """Each attempt waits for its outcome: a reward, or an error."""

    attempts: Counter[int] = field(default_factory=Counter)
    outcomes: dict[int, "asyncio.Future[Exception | None]"] = field(default_factory=dict)
    started: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        self.attempts[task.sample_index] += 1
        outcome = asyncio.get_running_loop().create_future()
        self.outcomes[task.sample_index] = outcome
        self.started.set()
        if (error := await outcome) is not None:
            raise error
        return Trajectory(
            task=task, samples=(), messages=task.messages, stop=StopReason.FINISHED, reward=1.0
        )

    async def until_running(self, *numbers: int) -> None:
        while not all(n in self.outcomes for n in numbers):
            self.started.clear()
            await self.started.wait()

    def end(self, number: int, error: Exception | None = None) -> None:
        self.outcomes.pop(number).set_result(error)


@dataclass
class Pool:
    """A server that dies when a test says so, and is replaced when it is asked for."""

    generator: ScriptedGenerator = field(default_factory=lambda: ScriptedGenerator([]))
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    live: tuple[None, ...] = (None,)

    def on_change(self, listener: Callable[[Routes], None]) -> Callable[[], None]:
        listener(Routes(serving=("127.0.0.1:1",)))
        return lambda: None

    async def ensure_healthy(self) -> bool:
        died = self.lost.is_set()
        self.lost.clear()
        return died

    async def wait_for_change(self) -> None:
        await asyncio.Event().wait()

    async def wait_until_all_ended(self) -> None:
        await self.lost.wait()


@dataclass
class Source:
    """Tasks that may run now, and how those that ended did."""

    ready: list[AgentTask] = field(default_factory=list)
    ended: dict[int, Trajectory] = field(default_factory=dict)
    any_end: asyncio.Event = field(default_factory=asyncio.Event)

    def next_tasks(self) -> Sequence[AgentTask]:
        return (self.ready.pop(0),) if self.ready else ()

    def on_end(self, trajectory: Trajectory) -> None:
        assert trajectory.task.sample_index not in self.ended
        self.ended[trajectory.task.sample_index] = trajectory
        self.any_end.set()

    async def until_ended(self, *numbers: int) -> None:
        while not all(n in self.ended for n in numbers):
            self.any_end.clear()
            await self.any_end.wait()


def _task(number: int) -> AgentTask:
    return AgentTask(
        task_id=f"train/{number}",
        sample_index=number,
        rollout_index=0,
        loop="waiting",
        messages=(Message(role="user", content="hi"),),
        seed=number,
    )


@contextlib.asynccontextmanager
async def _running(
    loop: Loop, source: Source, pool: Pool, *settings: str
) -> AsyncIterator[ContinuousRollout]:
    rules = SimpleNamespace(loops=LoopRegistry({"waiting": loop}), tools={}, interactions={})
    given = ["model.path=/m", "data.train_files=/t.jsonl", "agent.max_attempts=1"]
    given += [f"rollout.max_in_flight={_MAX_IN_FLIGHT}", *settings]
    rollout = ContinuousRollout(
        rollout=Rollout(
            config=load_config([], given).config,
            servers=cast(Any, pool),
            renderer=cast(Any, None),
            rules=cast(Any, rules),
            reward=lambda _: 0.0,
        ),
        sampling=SamplingParams(max_tokens=1),
        next_tasks=source.next_tasks,
        on_end=source.on_end,
        version=lambda: 0,
    )
    running = asyncio.create_task(rollout.run())
    await rollout.recover()
    try:
        yield rollout
    finally:
        running.cancel()
        await asyncio.wait({running})


@pytest.mark.asyncio
async def test_a_task_is_taken_when_a_slot_is_free_and_the_source_has_one() -> None:
    loop, source = Loop(), Source([_task(n) for n in range(5)])
    async with _running(loop, source, Pool()) as rollout:
        await loop.until_running(0, 1, 2)
        assert len(source.ready) == 2, "there are three slots"
        loop.end(1)
        await loop.until_running(3)
        loop.end(0)
        await loop.until_running(4)
        for number in (2, 3, 4):
            loop.end(number)
        await source.until_ended(0, 1, 2, 3, 4)
        source.ready.append(_task(5))
        rollout.look_again()
        await loop.until_running(5)
    assert set(loop.attempts.values()) == {1}


@pytest.mark.asyncio
async def test_what_was_in_flight_when_the_last_server_died_is_attempted_again() -> None:
    loop, source, pool = Loop(), Source([_task(n) for n in range(3)]), Pool()
    async with _running(loop, source, pool) as rollout:
        await loop.until_running(0, 1, 2)
        loop.end(0)
        await source.until_ended(0)
        loop.outcomes.clear()
        pool.lost.set()
        await rollout.troubled.wait()
        assert not loop.outcomes, "nothing runs before the servers are replaced"
        await rollout.recover()
        await loop.until_running(1, 2)
        loop.end(1)
        loop.end(2)
        await source.until_ended(1, 2)
    assert loop.attempts == {0: 1, 1: 2, 2: 2}


@pytest.mark.asyncio
@pytest.mark.parametrize("died", [True, False])
async def test_a_server_error_is_attempted_again_if_a_server_was_replaced(died: bool) -> None:
    loop, source, pool = Loop(), Source([_task(0)]), Pool()
    async with _running(loop, source, pool) as rollout:
        await loop.until_running(0)
        loop.end(0, EngineFailedError("it is gone"))
        await rollout.troubled.wait()
        assert not source.ended, "nobody knows yet whether a server died"
        pool.ensure_healthy = _answers(died)  # type: ignore[method-assign]
        await rollout.recover()
        if died:
            await loop.until_running(0)
            loop.end(0)
        await source.until_ended(0)
    assert (source.ended[0].error is None) is died


def _answers(disturbed: bool) -> Any:
    async def ensure_healthy() -> bool:
        return disturbed

    return ensure_healthy


@pytest.mark.asyncio
async def test_a_failed_reward_is_held_until_others_show_whether_it_is_down() -> None:
    loop, source, pool = Loop(), Source([_task(n) for n in range(3)]), Pool()
    async with _running(loop, source, pool) as rollout:
        await loop.until_running(0, 1, 2)
        loop.end(0)
        await source.until_ended(0)  # the reward has served one
        loop.end(1, RewardError("the judge does not answer"))
        await rollout.troubled.wait()
        await rollout.recover()
        assert 1 not in source.ended
        loop.end(2)
        await source.until_ended(2)
        await rollout.troubled.wait()
        await rollout.recover()
        assert source.ended[1].error is not None, "the reward served another one: it is not down"


@pytest.mark.asyncio
async def test_a_reward_that_never_served_ends_the_run_while_others_are_in_flight() -> None:
    loop, source, pool = Loop(), Source([_task(n) for n in range(3)]), Pool()
    async with _running(loop, source, pool, "agent.max_consecutive_failures=2") as rollout:
        await loop.until_running(0, 1, 2)
        for number in (0, 1):
            loop.end(number, RewardError("KeyError: 'answer'"))
        while rollout.rollout.outages.failures != {"the reward": 2}:
            await rollout.troubled.wait()
            rollout.troubled.clear()
        with pytest.raises(OutageError, match=r"the reward failed 2 .* never served one"):
            await rollout.recover()
        assert set(source.ended) == {0, 1}
