"""Tests of the watchdog: what is reported, once, and that nothing runs without need."""

import asyncio
import contextlib

import pytest

from treadle.agent_loop import (
    AgentTask,
    Drop,
    LoopLimits,
    Message,
    RolloutRunner,
    SamplingParams,
    Services,
    Trajectory,
    Watchdog,
    default_loops,
)
from treadle.agent_loop.testing import (
    ByteRenderer,
    FakeClock,
    ScriptedGenerator,
    ScriptedInteraction,
    ScriptedTool,
)

pytestmark = pytest.mark.asyncio
CALL = '<tool_call>{"name": "lookup", "arguments": {}}</tool_call>'


async def test_a_stall_is_reported_once_and_again_after_a_beat() -> None:
    clock = FakeClock()
    async with Watchdog(10.0, clock=clock) as watchdog:
        with watchdog.watch("task t") as pulse:
            await clock.until_sleeping(1)
            await clock.advance(9.0)
            pulse.beat("thinking")
            await clock.advance(1.0)  # the first look: the beat is a second old
            await clock.until_sleeping(1)
            assert clock.slept == [10.0, 9.0]
            await clock.advance(9.0)
            assert pulse.stalls == ["task t: nothing for 10 s since it was thinking"]
            await clock.advance(100.0)
            assert len(pulse.stalls) == 1
            pulse.beat("thinking again")
            await clock.until_sleeping(1)
            await clock.advance(12.0)
            assert pulse.stalls[1:] == ["task t: nothing for 12 s since it was thinking again"]


async def test_it_sleeps_until_the_first_could_be_late_and_never_without_a_trajectory() -> None:
    clock = FakeClock()
    async with Watchdog(10.0, clock=clock) as watchdog:
        await asyncio.sleep(0)
        assert clock.slept == []  # it waits for a trajectory
        with watchdog.watch("a") as first:
            await clock.until_sleeping(1)
            await clock.advance(4.0)
            with watchdog.watch("b") as second:
                await clock.advance(6.0)
                assert len(first.stalls) == 1
                await clock.until_sleeping(1)
                assert clock.slept == [10.0, 4.0]
                await clock.advance(4.0)
                assert len(second.stalls) == 1
        await clock.advance(1000.0)
        assert clock.slept == [10.0, 4.0]


async def test_the_log_names_a_few_of_many(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    async with Watchdog(10.0, clock=clock) as watchdog:
        with contextlib.ExitStack() as stack:
            pulses = [stack.enter_context(watchdog.watch(f"task {i}")) for i in range(100)]
            for round_ in (1, 2):
                for pulse in pulses:
                    pulse.beat("thinking")
                await clock.until_sleeping(1)
                await clock.advance(10.0)
                assert [len(pulse.stalls) for pulse in pulses] == [round_] * 100
                assert caplog.text.count("stuck: task") == 5 * round_
                assert caplog.text.count("more trajectories are stuck; for the next 10 s") == round_


async def test_it_can_be_off() -> None:
    clock = FakeClock()
    async with Watchdog(None, clock=clock) as watchdog:
        with watchdog.watch("a") as pulse:
            pulse.beat("thinking")
            await asyncio.sleep(0)
    assert clock.slept == []


class Run:
    """A run of one task that gets stuck in one of these."""

    def __init__(
        self,
        generator: ScriptedGenerator,
        tool: ScriptedTool | None = None,
        teacher: ScriptedInteraction | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.delivered: list[Trajectory] = []
        services = Services(
            generator=generator,
            renderer=ByteRenderer(),
            limits=LoopLimits(max_response_tokens=1000),
            sampling=SamplingParams(max_tokens=200),
            tools={} if tool is None else {"lookup": tool},
            interactions={} if teacher is None else {"teacher": teacher},
        )
        runner = RolloutRunner(
            default_loops(),
            services,
            max_in_flight=2,
            deadline_s=60.0,
            failure_policy=Drop(),
            watchdog_s=30.0,
            clock=self.clock,
        )
        extra = {} if teacher is None else {"interaction_kwargs": {"name": "teacher"}}
        task = AgentTask(
            task_id="t",
            sample_index=0,
            rollout_index=2,
            loop="tool_agent",
            messages=(Message(role="user", content="hi"),),
            fields={"extra_info": extra},
        )
        self.task = asyncio.create_task(runner.run([task], self._take))

    async def _take(self, trajectory: Trajectory) -> None:
        self.delivered.append(trajectory)

    async def cancel_when_reported(self) -> None:
        await self.clock.until_sleeping(1)
        await self.clock.advance(30.0)
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task


async def test_the_runner_names_the_session_and_what_it_waits_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    generator = ScriptedGenerator()
    generator.hold()
    run = Run(generator)
    await generator.until_running(1)
    await run.cancel_when_reported()
    assert (
        "stuck: task t, rollout 2: nothing for 30 s since it was generating as t/2/" in caplog.text
    )


async def test_a_stuck_tool_is_named(caplog: pytest.LogCaptureFixture) -> None:
    tool = ScriptedTool(results=[asyncio.Event()])
    run = Run(ScriptedGenerator([CALL]), tool)
    await tool.until_called(1)
    await run.cancel_when_reported()
    assert "since it was waiting for tools: ['lookup'] in session t/2/" in caplog.text
    assert tool.num_closed == 1


async def test_a_stuck_interaction_is_named(caplog: pytest.LogCaptureFixture) -> None:
    teacher = ScriptedInteraction([asyncio.Event()])
    run = Run(ScriptedGenerator(["41"]), teacher=teacher)
    await teacher.until_asked(1)
    await run.cancel_when_reported()
    assert "since it was waiting for the interaction in session t/2/" in caplog.text


async def test_a_stall_is_counted_in_the_report_and_the_trajectory_goes_on() -> None:
    gate = asyncio.Event()
    tool = ScriptedTool(results=[gate])
    run = Run(ScriptedGenerator([CALL, "done"]), tool)
    await tool.until_called(1)
    await run.clock.until_sleeping(1)
    await run.clock.advance(31.0)
    gate.set()
    report = await run.task
    count, first = report.findings["stalled"]
    assert count == 1
    assert first.startswith("task t, rollout 2: nothing for 31 s since it was waiting for tools")
    (trajectory,) = run.delivered
    assert first in [finding.text for finding in trajectory.findings]
