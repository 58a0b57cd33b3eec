"""Tests of the runner: its numbered invariants, strategies, deadlines, cancellation."""

import asyncio
import re
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from treadle.agent_loop import (
    AgentTask,
    Conversation,
    Drop,
    FailFast,
    FailurePolicy,
    LoopError,
    LoopLimits,
    Message,
    OverloadedError,
    PromptTooLongError,
    Retry,
    RewardError,
    RolloutRunner,
    SamplingParams,
    Score,
    Services,
    StopReason,
    Trajectory,
    TrajectoryTimeoutError,
    UnknownLoopError,
    default_loops,
)
from treadle.agent_loop.loops.loop import RewardFn
from treadle.agent_loop.testing import ByteRenderer, EchoGenerator, ScriptedGenerator
from treadle.agent_loop.testing.fake_clock import let_pass
from treadle.tracing import MemorySink, plain, use_sink

pytestmark = pytest.mark.asyncio

SERVICES = Services(
    generator=EchoGenerator(),
    renderer=ByteRenderer(),
    limits=LoopLimits(max_response_tokens=100),
    sampling=SamplingParams(max_tokens=100),
)


def task(index: int, loop: str = "single_turn_agent") -> AgentTask:
    return AgentTask(
        task_id=f"t{index}",
        sample_index=index,
        rollout_index=0,
        loop=loop,
        messages=(Message(role="user", content=f"say {index}"),),
    )


class GatedLoop:
    """Waits for a gate, then does what `behave` says."""

    def __init__(self, behave: Callable[[AgentTask], Awaitable[None]] | None = None) -> None:
        self.gate = asyncio.Event()
        self.running: Counter[str] = Counter()
        self.most = 0
        self.attempts: Counter[str] = Counter()
        self._behave = behave
        self._arrived = asyncio.Condition()

    async def until_running(self, count: int) -> None:
        async with self._arrived:
            await self._arrived.wait_for(lambda: self.running.total() == count)

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        self.attempts[task.task_id] += 1
        self.running[task.task_id] += 1
        self.most = max(self.most, self.running.total())
        async with self._arrived:
            self._arrived.notify_all()
        try:
            if self._behave is not None:
                await self._behave(task)
            await self.gate.wait()
        finally:
            self.running[task.task_id] -= 1
        return await default_loops().resolve("single_turn_agent").run(task, services)


def runner(
    loop: GatedLoop | None = None,
    *,
    max_in_flight: int = 4,
    deadline_s: float = 60.0,
    failure_policy: FailurePolicy | None = None,
    reward: RewardFn | None = None,
    services: Services = SERVICES,
) -> RolloutRunner:
    loops = default_loops() if loop is None else default_loops().adding("gated", loop)
    return RolloutRunner(
        loops,
        replace(services, reward=reward),
        max_in_flight=max_in_flight,
        deadline_s=deadline_s,
        failure_policy=failure_policy or Drop(),
    )


class Collected:
    def __init__(self) -> None:
        self.trajectories: list[Trajectory] = []

    async def __call__(self, trajectory: Trajectory) -> None:
        self.trajectories.append(trajectory)

    def ids(self) -> list[str]:
        return sorted(t.task.task_id for t in self.trajectories)


async def test_every_task_gives_one_trajectory() -> None:
    sink = Collected()
    report = await runner(reward=lambda t: float(t.final_text == "say 3")).run(
        (task(i) for i in range(20)), sink
    )
    assert sink.ids() == sorted(f"t{i}" for i in range(20))
    assert sum(t.reward or 0.0 for t in sink.trajectories) == 1.0
    assert (report.num_tasks, report.num_failed, report.num_retries) == (20, 0, 0)
    assert report.stops == {StopReason.FINISHED: 20}
    assert report.num_sampled_tokens == sum(t.tokens.num_sampled_tokens for t in sink.trajectories)


async def test_a_trajectory_keeps_the_answer_that_its_reward_read() -> None:
    sink = Collected()
    await runner(reward=lambda t: Score(value=0.5, answer=t.final_text)).run([task(3)], sink)
    assert [(t.reward, t.answer) for t in sink.trajectories] == [(0.5, "say 3")]


class ScoresItself:
    """Says that it scores, and does for the first task only."""

    scores_itself = True

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        with Conversation(task, services) as chat:
            await chat.generate()
            return chat.finish(StopReason.FINISHED, reward=0.5 if task.task_id == "t0" else None)


async def test_a_loop_that_scores_itself_owes_a_reward() -> None:
    sink = Collected()
    loops = default_loops().adding("scoring", ScoresItself())
    await RolloutRunner(
        loops,
        replace(SERVICES, reward=lambda _: 1.0),
        max_in_flight=1,
        deadline_s=60.0,
        failure_policy=Drop(),
    ).run([task(0, "scoring"), task(1, "scoring")], sink)
    assert [t.reward for t in sink.trajectories] == [0.5, None]
    error = sink.trajectories[1].error
    assert isinstance(error, LoopError) and "'scoring' says scores_itself" in str(error)


async def test_at_most_max_in_flight_run_and_the_source_is_taken_as_places_come_free() -> None:
    loop, taken, sink = GatedLoop(), [], Collected()

    async def source() -> AsyncIterator[AgentTask]:
        for i in range(10):
            taken.append(i)
            yield task(i, "gated")

    run = asyncio.create_task(runner(loop, max_in_flight=3).run(source(), sink))
    await loop.until_running(3)
    assert len(taken) == 3
    loop.gate.set()
    await run
    assert loop.most == 3
    assert len(sink.trajectories) == 10


async def test_the_bound_follows_what_it_is_set_to_while_tasks_run() -> None:
    loop, three, ended = GatedLoop(), asyncio.Event(), list[Trajectory]()

    async def sink(trajectory: Trajectory) -> None:
        ended.append(trajectory)
        if len(ended) == 3:
            three.set()

    running = runner(loop, max_in_flight=0)
    run = asyncio.create_task(running.run([task(n, "gated") for n in range(4)], sink))
    running.set_max_in_flight(1)
    await loop.until_running(1)
    running.set_max_in_flight(3)
    await loop.until_running(3)
    running.set_max_in_flight(0)
    loop.gate.set()
    await three.wait()
    assert loop.attempts.total() == 3
    running.set_max_in_flight(1)
    assert (await run).num_tasks == 4


async def test_a_slow_sink_stops_the_intake_and_is_called_by_one_task_at_a_time() -> None:
    taken: list[int] = []
    gate, entered, inside = asyncio.Event(), asyncio.Event(), Counter[str]()

    def source() -> object:
        for i in range(8):
            taken.append(i)
            yield task(i)

    async def slow(trajectory: Trajectory) -> None:
        inside["now"] += 1
        assert inside["now"] == 1
        entered.set()
        await gate.wait()
        inside["now"] -= 1
        inside["done"] += 1

    run = asyncio.create_task(runner(max_in_flight=2).run(source(), slow))  # type: ignore[arg-type]
    await entered.wait()
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(taken) == 2
    gate.set()
    await run
    assert inside["done"] == 8


async def fail_odd(task: AgentTask) -> None:
    if task.sample_index % 2:
        raise OverloadedError("full")


async def test_drop_delivers_the_failure_and_the_others_go_on() -> None:
    loop, sink = GatedLoop(fail_odd), Collected()
    loop.gate.set()
    report = await runner(loop).run([task(i, "gated") for i in range(4)], sink)
    assert sink.ids() == ["t0", "t1", "t2", "t3"]
    failed = [t for t in sink.trajectories if t.stop is StopReason.ERROR]
    assert {t.task.task_id for t in failed} == {"t1", "t3"}
    assert all(isinstance(t.error, OverloadedError) and not t.tokens.ids for t in failed)
    assert (report.num_failed, report.errors) == (2, {"OverloadedError": (2, "full")})


async def test_retry_attempts_again_and_gives_up() -> None:
    failures = iter([OverloadedError("full"), OverloadedError("full")])

    async def fail_twice(task: AgentTask) -> None:
        if (error := next(failures, None)) is not None:
            raise error

    for attempts, stop in ((3, StopReason.FINISHED), (2, StopReason.ERROR)):
        failures = iter([OverloadedError("full"), OverloadedError("full")])
        loop, sink = GatedLoop(fail_twice), Collected()
        loop.gate.set()
        failure_policy = Retry(max_attempts=attempts)
        report = await runner(loop, failure_policy=failure_policy).run([task(0, "gated")], sink)
        assert [t.stop for t in sink.trajectories] == [stop]
        assert loop.attempts["t0"] == attempts
        assert report.num_retries == attempts - 1


async def test_retry_does_not_repeat_what_cannot_change() -> None:
    async def too_long(task: AgentTask) -> None:
        raise PromptTooLongError("too long")

    loop, sink = GatedLoop(too_long), Collected()
    await runner(loop, failure_policy=Retry(max_attempts=5)).run([task(0, "gated")], sink)
    assert loop.attempts["t0"] == 1


async def test_fail_fast_cancels_the_others_and_raises_the_error_itself() -> None:
    async def fail_three(task: AgentTask) -> None:
        if task.sample_index == 3:
            raise OverloadedError("full")

    loop = GatedLoop(fail_three)
    with pytest.raises(OverloadedError, match="full"):
        await runner(loop, failure_policy=FailFast()).run(
            [task(i, "gated") for i in range(4)], Collected()
        )
    assert loop.running.total() == 0


async def test_a_bug_in_a_loop_is_isolated_and_named() -> None:
    async def bug(task: AgentTask) -> None:
        raise KeyError("oops")

    sink = Collected()
    await runner(GatedLoop(bug)).run([task(0, "gated"), task(1)], sink)
    (failed,) = [t for t in sink.trajectories if t.error]
    assert isinstance(failed.error, LoopError)
    assert "agent loop 'gated', task 't0': KeyError: 'oops'" in str(failed.error)
    assert isinstance(failed.error.__cause__, KeyError)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, r"run\(\) must return a Trajectory, got None"),
        ("text", r"run\(\) must return a Trajectory, got 'text'"),
        (Trajectory.failed(task(7), LoopError("x")), "got one of task 't7', rollout 0"),
    ],
)
async def test_a_loop_that_gives_something_else_fails_alone(result: object, said: str) -> None:
    class Odd:
        async def run(self, task: AgentTask, services: Services) -> Trajectory:
            return result  # type: ignore[return-value]

    sink = Collected()
    odd = RolloutRunner(
        default_loops().adding("odd", Odd()),
        replace(SERVICES, reward=lambda trajectory: 1.0),
        max_in_flight=4,
        deadline_s=60.0,
        failure_policy=Drop(),
    )
    report = await odd.run([task(0, "odd"), task(1)], sink)
    assert (report.num_tasks, report.num_failed) == (2, 1)
    (failed,) = [t for t in sink.trajectories if t.error is not None]
    assert isinstance(failed.error, LoopError)
    assert re.search(said, str(failed.error))


async def test_a_reward_of_a_loop_that_is_no_number_fails_its_attempt() -> None:
    class Odd:
        async def run(self, task: AgentTask, services: Services) -> Trajectory:
            with Conversation(task, services) as chat:
                await chat.generate()
                return chat.finish(StopReason.FINISHED, reward=float("nan"))

    sink = Collected()
    odd = RolloutRunner(
        default_loops().adding("odd", Odd()),
        SERVICES,
        max_in_flight=4,
        deadline_s=60.0,
        failure_policy=Drop(),
    )
    await odd.run([task(0, "odd")], sink)
    assert "the reward is nan; it must be a finite number" in str(sink.trajectories[0].error)


async def test_a_loop_that_ends_as_cancelled_by_itself_is_no_lost_task() -> None:
    async def cancelled(task: AgentTask) -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    sink = Collected()
    await runner(GatedLoop(cancelled)).run([task(0, "gated")], sink)
    assert isinstance(sink.trajectories[0].error, LoopError)
    assert "CancelledError, though nobody cancelled it" in str(sink.trajectories[0].error)


async def test_fail_fast_keeps_what_caused_the_error() -> None:
    async def bug(task: AgentTask) -> None:
        raise KeyError("oops")

    with pytest.raises(LoopError) as failed:
        await runner(GatedLoop(bug), failure_policy=FailFast()).run([task(0, "gated")], Collected())
    assert isinstance(failed.value.__cause__, KeyError)


@pytest.mark.parametrize("value", [float("nan"), "seven"])
async def test_a_reward_that_is_no_number_fails_the_attempt(value: object) -> None:
    sink = Collected()
    await runner(reward=lambda t: value).run([task(0)], sink)  # type: ignore[arg-type,return-value]
    assert isinstance(sink.trajectories[0].error, RewardError)


@pytest.mark.parametrize("where", ["loop", "reward"])
async def test_code_that_calls_exit_fails_its_own_attempt(where: str) -> None:
    async def behave(task: AgentTask) -> None:
        if where == "loop" and task.task_id == "t0":
            sys.exit(0)

    def reward(trajectory: Trajectory) -> float:
        if where == "reward" and trajectory.task.task_id == "t0":
            sys.exit(0)
        return 1.0

    collected, loop = Collected(), GatedLoop(behave)
    loop.gate.set()
    tasks = [task(index, "gated") for index in range(2)]
    report = await runner(loop, reward=reward).run(tasks, collected)
    assert report.num_failed == 1
    (failed,) = (t for t in collected.trajectories if t.stop is StopReason.ERROR)
    assert failed.task.task_id == "t0"
    assert str(failed.error).endswith(": SystemExit: 0")


@pytest.mark.parametrize("value", [1.7e308, -1.7e308, 1.0001e100])
async def test_a_reward_whose_square_is_no_float_fails_its_attempt(value: float) -> None:
    sink = Collected()
    report = await runner(reward=lambda _: value).run([task(0)], sink)
    assert report.num_failed == 1
    assert "it must be between -1e+100 and 1e+100" in str(sink.trajectories[0].error)


async def test_a_plain_reward_leaves_the_event_loop_free() -> None:
    both = threading.Barrier(2, timeout=60)

    def reward(trajectory: Trajectory) -> float:
        both.wait()  # for the reward of the other trajectory
        return 1.0

    collected = Collected()
    await runner(reward=reward).run([task(0), task(1)], collected)
    assert [t.reward for t in collected.trajectories] == [1.0, 1.0]


async def test_an_async_reward_is_awaited() -> None:
    async def reward(trajectory: Trajectory) -> float:
        await asyncio.sleep(0)
        return 0.25

    sink = Collected()
    await runner(reward=reward).run([task(0)], sink)
    assert sink.trajectories[0].reward == 0.25


async def late(kit: Services, asked: Awaitable[object]) -> TrajectoryTimeoutError:
    """The error of an attempt whose minute passes when the generator was asked."""
    sink = Collected()
    running = asyncio.create_task(runner(deadline_s=60.0, services=kit).run([task(0)], sink))
    await asked
    let_pass(60.0)
    await running
    error = sink.trajectories[0].error
    assert isinstance(error, TrajectoryTimeoutError)
    return error


async def test_the_deadline_cancels_an_attempt_and_says_what_it_was_doing() -> None:
    generator = ScriptedGenerator()
    generator.hold()
    error = await late(replace(SERVICES, generator=generator), generator.until_running(1))
    assert not error.retryable
    assert generator.num_aborted == 1
    assert generator.num_running == 0


async def test_the_deadline_names_the_last_activity_of_a_stuck_session() -> None:
    asked = asyncio.Event()

    class StuckGenerator(EchoGenerator):
        async def generate(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
            asked.set()
            await asyncio.Event().wait()
            return None

    kit = replace(SERVICES, generator=StuckGenerator())  # type: ignore[arg-type]
    said = str(await late(kit, asked.wait()))
    assert "did not end within 60 s: session t0/0/" in said
    assert "was generating as" in said


async def test_cancelling_the_run_leaves_nothing_behind() -> None:
    loop = GatedLoop()
    source_closed = asyncio.Event()

    async def source() -> AsyncIterator[AgentTask]:
        try:
            for i in range(10):
                yield task(i, "gated")
        finally:
            source_closed.set()

    run = asyncio.create_task(runner(loop).run(source(), Collected()))
    await loop.until_running(4)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert loop.running.total() == 0
    assert source_closed.is_set()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_runner_serves_several_runs_on_several_event_loops() -> None:
    """With the watchdog on, which waits for events and the clock."""
    one = RolloutRunner(
        default_loops(),
        SERVICES,
        max_in_flight=2,
        deadline_s=60.0,
        failure_policy=Drop(),
        watchdog_s=30.0,
    )

    async def both() -> int:
        reports = await asyncio.gather(*(one.run([task(0), task(1)], Collected()) for _ in "ab"))
        return sum(report.num_tasks for report in reports)

    assert [await asyncio.to_thread(asyncio.run, both()) for _ in range(2)] == [4, 4]


@pytest.mark.parametrize("watchdog_s", [0.0, -1.0])
async def test_a_watchdog_without_time_is_refused(watchdog_s: float) -> None:
    with pytest.raises(ValueError, match=f"watchdog_s is {watchdog_s}"):
        RolloutRunner(
            default_loops(),
            SERVICES,
            max_in_flight=1,
            deadline_s=1.0,
            failure_policy=Drop(),
            watchdog_s=watchdog_s,
        )


async def test_an_error_of_the_sink_ends_the_run_as_it_is() -> None:
    async def full(trajectory: Trajectory) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await runner().run([task(i) for i in range(3)], full)


async def test_an_error_of_the_source_ends_the_run_as_it_is() -> None:
    def source() -> object:
        yield task(0)
        raise ValueError("bad row")

    with pytest.raises(ValueError, match="bad row"):
        await runner().run(source(), Collected())  # type: ignore[arg-type]


async def test_an_unknown_loop_ends_the_run() -> None:
    with pytest.raises(UnknownLoopError, match="registered agent loops: single_turn_agent, tool_"):
        await runner().run([task(0, "nope")], Collected())


async def test_the_run_is_traced() -> None:
    sink = MemorySink()
    with use_sink(sink):
        await runner().run([task(0)], Collected())
    names = {s.name: s for s in sink.spans}
    assert names["generate"].parent_id == names["trajectory"].span_id
    assert names["trajectory"].attributes["stop"] == "finished"
    output = plain(names["trajectory"].attributes["output"])
    assert isinstance(output, dict)
    assert [message["role"] for message in output["messages"]] == ["user", "assistant"]
    for each in names.values():
        assert each.attributes["sample_index"] == task(0).sample_index
        assert each.attributes["rollout_n"] == task(0).rollout_index


class ReseedingLoop:
    """Makes its task anew, as a loop may that adds a message, and forgets the seed."""

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        made = await default_loops().resolve("single_turn_agent").run(task, services)
        return replace(made, task=replace(task, seed=None))


async def test_a_trajectory_has_the_seed_of_its_task() -> None:
    sink, spans = Collected(), MemorySink()
    loops = default_loops().adding("reseeding", ReseedingLoop())
    runs = RolloutRunner(
        loops,
        SERVICES,
        max_in_flight=1,
        deadline_s=60.0,
        failure_policy=Drop(),
        span_attributes=lambda task: {"step": task.seed},
    )
    with use_sink(spans):
        await runs.run([replace(task(0, "reseeding"), seed=7)], sink)
    assert [trajectory.task.seed for trajectory in sink.trajectories] == [7]
    (traced,) = [span for span in spans.spans if span.name == "trajectory"]
    assert traced.attributes["step"] == 7
