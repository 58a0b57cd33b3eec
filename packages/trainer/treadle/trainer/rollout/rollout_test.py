"""Tests of the rollout's bookkeeping; what servers do is tested end to end."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
    StopReason,
    ToolError,
    Trajectory,
    TrajectoryTimeoutError,
    Transcript,
    boundary,
)
from treadle.agent_loop.testing import ScriptedGenerator
from treadle.tools.rewards import from_function, weighed
from treadle.trainer.config.load import load_config
from treadle.trainer.report.failures import of_own_code
from treadle.trainer.rollout.outages import OutageError
from treadle.trainer.rollout.rollout import Rollout
from treadle.trainer.rollout.rotation import Routes


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

    async def run_until_lost(
        self,
        tasks: Iterable[AgentTask] | AsyncIterable[AgentTask],
        make_runner: object,
        sink: Callable[[Trajectory], Awaitable[None]],
        *,
        replacing: bool = False,
    ) -> bool:
        assert isinstance(tasks, Sequence)
        self.story.num_attempts += len(tasks)
        for task in tasks:
            error = (ToolError if task.rollout_index % 2 else RewardError)("it is down")
            await sink(Trajectory.failed(task, error))
        return False


@pytest.mark.asyncio
@pytest.mark.parametrize(("num_deaths", "num_attempts"), [(0, 4), (2, 8)])
async def test_each_trajectory_ends_once_however_often_it_was_attempted(
    num_deaths: int, num_attempts: int
) -> None:
    story, unused = Story(num_deaths), cast(Any, None)
    rollout = Failing(
        config=load_config([], ["model.path=/m", "data.train_files=/t.jsonl"]).config,
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
    changes: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    live: tuple[None, ...] = (None,)
    listeners: list[Callable[[Routes], None]] = field(default_factory=list)
    joins: bool = False

    def on_change(self, listener: Callable[[Routes], None]) -> Callable[[], None]:
        listener(Routes(serving=("127.0.0.1:1",)))
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    async def ensure_healthy(self) -> bool:
        died, joined = self.lost.is_set(), self.joins
        self.lost.clear()
        self.joins = False
        if died:
            self.generator.release()
        if joined:
            for listener in self.listeners:
                listener(Routes(serving=("127.0.0.1:1", "127.0.0.1:2")))
        return died or joined

    async def wait_for_change(self) -> None:
        await self.changes.acquire()

    async def wait_until_all_ended(self) -> None:
        await self.lost.wait()


def _rollout(pool: Pool, *settings: str) -> Rollout:
    rules = SimpleNamespace(loops=LoopRegistry({"careless": Careless()}), tools={}, interactions={})
    return Rollout(
        config=load_config([], ["model.path=/m", "data.train_files=/t.jsonl", *settings]).config,
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


@pytest.mark.asyncio
async def test_tasks_wait_where_all_servers_have_ended_before_the_first_one_begins() -> None:
    pool = Pool(ScriptedGenerator([[2], [2]]))
    pool.live = ()
    pool.lost.set()
    trajectories = await _rollout(pool).run(
        _tasks(1), SamplingParams(max_tokens=1), min_weight_version=0, on_end=lambda _: None
    )
    assert len(trajectories) == 1


@pytest.mark.asyncio
async def test_a_server_that_comes_in_the_middle_of_a_rollout_takes_its_share_at_once() -> None:
    pool = Pool(ScriptedGenerator([[2]] * 4))
    pool.generator.hold()
    rollout = _rollout(pool, "rollout.max_in_flight=2")
    running = asyncio.create_task(
        rollout.run(
            _tasks(4), SamplingParams(max_tokens=1), min_weight_version=0, on_end=lambda _: None
        )
    )
    await pool.generator.until_running(2)
    assert len(pool.generator.requests) == 2, "there is one server"
    pool.joins = True
    pool.changes.release()
    await pool.generator.until_running(4)
    pool.generator.release()
    assert len(await running) == 4
    assert pool.listeners == []


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody else gets, also while the service is down."""
    with socket.socket() as held:
        # With this option, which asyncio's servers set too, it is not in their way.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


class Search:
    """A service behind a port, which may be down; the loop asks it as a tool would."""

    def __init__(self, port: int, *, refused: str | None = None) -> None:
        self.port = port
        self.refused = refused  # the row that it refuses even when it is up
        self.num_served = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"found")
            writer.close()

        self._server = await asyncio.start_server(serve, "127.0.0.1", self.port)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        """The agent loop: every second trajectory asks the service."""
        messages = task.messages
        if task.rollout_index % 2 == 0:
            with boundary(ToolError, "tool 'search'"):
                try:
                    if task.task_id == self.refused:
                        raise ConnectionRefusedError(f"it refuses {task.task_id}")
                    reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except OSError as error:
                    failure = ToolError(f"tool 'search': {error}")
                    failure.tool = "search"
                    raise failure from error
                text = (await reader.read()).decode()
                writer.close()
            self.num_served += 1
            messages = (*messages, Message(role="tool", name="search", content=text))
        return Trajectory(
            task=task,
            samples=(Transcript([1]).freeze(),),
            messages=messages,
            stop=StopReason.FINISHED,
        )


def _searching(search: Search, **agent: object) -> Rollout:
    settings = [f"agent.{key}={value}" for key, value in agent.items()]
    rules = SimpleNamespace(loops=LoopRegistry({"careless": search}), tools={}, interactions={})
    return Rollout(
        config=load_config(
            [], ["model.path=/m", "data.train_files=/t.jsonl", "agent.max_attempts=1", *settings]
        ).config,
        servers=cast(Any, Pool(ScriptedGenerator())),
        renderer=cast(Any, None),
        rules=cast(Any, rules),
        reward=lambda _: 0.0,
    )


async def _sample(rollout: Rollout, tasks: Sequence[AgentTask]) -> list[Trajectory]:
    ended: list[Trajectory] = []
    trajectories = await rollout.run(
        tasks, SamplingParams(max_tokens=1), min_weight_version=0, on_end=ended.append
    )
    assert len(ended) == len(tasks)
    rollout.check_outages(trajectories)
    return trajectories


class _StartAtWarning(logging.Handler):
    """Starts the service when the run says that it waits for it."""

    def __init__(self, search: Search) -> None:
        super().__init__(logging.WARNING)
        self.search = search
        self.said: list[str] = []
        self.started: asyncio.Task[None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        if self.started is None:
            self.started = asyncio.create_task(self.search.start())


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rollout, "_FIRST_PAUSE_S", 0.01)


def _comparing(reward: Callable[..., object], *settings: str) -> Rollout:
    weighted = weighed([("together", partial(from_function, reward))], {})
    return replace(_rollout(Pool(ScriptedGenerator()), *settings), reward=weighted)


def _ended(*rows: str) -> list[Trajectory]:
    task, samples = _tasks(1)[0], (Transcript([1]).freeze(),)
    return [
        Trajectory(
            task=replace(task, task_id=row),
            samples=samples,
            messages=task.messages,
            stop=StopReason.FINISHED,
        )
        for row in rows
    ]


@pytest.mark.asyncio
async def test_the_time_of_a_group_begins_when_its_reward_is_called() -> None:
    running, most, full = 0, 0, asyncio.Event()

    async def together(trajectories: Sequence[Trajectory]) -> list[float]:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        if running == 16:
            asyncio.get_running_loop().call_soon(full.set)
        await full.wait()
        running -= 1
        return [1.0 for _ in trajectories]

    done = await _comparing(together).compared(_ended(*map(str, range(40))))
    assert [t.reward for t in done] == [1.0] * 40
    assert most == 16, "the others wait, and their time does not pass"


@pytest.mark.asyncio
async def test_a_reward_of_a_group_that_is_down_is_waited_for_and_a_late_one_is_not() -> None:
    calls: list[str] = []

    async def together(trajectories: Sequence[Trajectory]) -> list[float]:
        calls.append(row := trajectories[0].task.task_id)
        if row == "late":
            await asyncio.Event().wait()
        if row == "wrong":
            raise ZeroDivisionError
        if row == "down" or calls.count(row) < 3:
            raise ConnectionRefusedError("it is down")
        return [1.0 for _ in trajectories]

    rollout = _comparing(together, "agent.outage_s=0.1", "agent.deadline_s=0.2")
    passing, late, wrong = await rollout.compared(_ended("passing", "late", "wrong"))
    assert passing.reward == 1.0
    assert isinstance(late.error, TrajectoryTimeoutError)
    assert of_own_code(wrong.error)
    assert [calls.count(row) for row in ("passing", "late", "wrong")] == [3, 1, 1]
    rollout.check_outages([passing, late, wrong])
    down = await rollout.compared(_ended("down"))
    with pytest.raises(OutageError, match=r"it is down.* within 0.1 s \(agent.outage_s\)"):
        rollout.check_outages(down)


@pytest.mark.asyncio
async def test_a_service_that_is_down_is_waited_for_and_no_trajectory_is_lost(port: int) -> None:
    search = Search(port)
    await search.start()
    rollout = _searching(search, max_consecutive_failures=4)
    assert [t.error for t in await _sample(rollout, _tasks(4))] == [None] * 4
    await search.stop()
    handler = _StartAtWarning(search)
    logger = logging.getLogger("treadle.trainer.rollout.rollout")
    logger.addHandler(handler)
    try:
        trajectories = await _sample(rollout, _tasks(20))
    finally:
        logger.removeHandler(handler)
        await search.stop()
    assert [t.error for t in trajectories] == [None] * 20
    assert search.num_served == 2 + 10
    assert (
        "tool 'search' failed 10 trajectories one after another (10 x ToolError, as: tool 'sea"
        in (handler.said[0])
    )
    assert "waiting up to 600 s for it (agent.outage_s)" in handler.said[0]
    assert "tool 'search' serves again, after " in handler.said[-2]
    assert handler.said[-1] == "attempting 9 trajectories again"


@pytest.mark.asyncio
async def test_a_row_that_always_fails_does_not_stand_for_its_service(port: int) -> None:
    def rows(*names: str) -> list[AgentTask]:
        made = _tasks(4)
        return [replace(made[n], task_id=name) for name in names for n in (0, 2)]

    search = Search(port, refused="broken")
    await search.start()
    rollout = _searching(search, max_consecutive_failures=4, outage_s=5)
    await _sample(rollout, rows("good"))
    await search.stop()
    handler = _StartAtWarning(search)
    logger = logging.getLogger("treadle.trainer.rollout.rollout")
    logger.addHandler(handler)
    try:
        trajectories = await _sample(rollout, rows("broken", "good"))
    finally:
        logger.removeHandler(handler)
        await search.stop()
    assert [t.error is None for t in trajectories] == [False, False, True, True]


@pytest.mark.asyncio
async def test_a_service_that_was_given_up_and_serves_again_is_up(port: int) -> None:
    search = Search(port)
    await search.start()
    rollout = _searching(search, max_consecutive_failures=3, outage_s=0.1)
    await _sample(rollout, _tasks(4))
    await search.stop()
    with pytest.raises(OutageError, match="'search' failed"):
        await _sample(rollout, _tasks(6))
    await search.start()
    await _sample(rollout, _tasks(6))
    await search.stop()
    one_of_two = await _sample(rollout, _tasks(2))
    assert [t.error is None for t in one_of_two] == [False, True]


@pytest.mark.asyncio
async def test_a_service_that_does_not_come_back_ends_the_run_with_that_reason(port: int) -> None:
    search = Search(port)
    await search.start()
    rollout = _searching(search, max_consecutive_failures=3, outage_s=0.1)
    await _sample(rollout, _tasks(4))
    await search.stop()
    with pytest.raises(OutageError, match=r"'search' failed 3 .* within 0.1 s \(agent.outage_s\)"):
        await _sample(rollout, _tasks(6))


@pytest.mark.asyncio
async def test_what_never_served_ends_the_run_at_its_last_failure(port: int) -> None:
    search = Search(port)
    await search.start()
    await search.stop()
    rollout = _searching(search, max_consecutive_failures=4)
    in_turn = rollout.config.rollout.model_copy(update={"max_in_flight": 1})
    rollout = replace(rollout, config=rollout.config.model_copy(update={"rollout": in_turn}))
    ended: list[Trajectory] = []
    trajectories = await rollout.run(
        _tasks(20), SamplingParams(max_tokens=1), min_weight_version=0, on_end=ended.append
    )
    with pytest.raises(OutageError, match=r"'search' failed 4 trajectories .* never served one"):
        rollout.check_outages(trajectories)
    assert [t.task.rollout_index for t in trajectories] == [*range(7)]
    assert len(ended) == len(trajectories)


@pytest.mark.asyncio
async def test_without_a_limit_the_run_goes_on_without_what_is_down(port: int) -> None:
    search = Search(port)
    await search.start()
    rollout = _searching(search, max_consecutive_failures="null")
    await _sample(rollout, _tasks(2))
    await search.stop()
    trajectories = await _sample(rollout, _tasks(10))
    assert sum(t.error is not None for t in trajectories) == 5
