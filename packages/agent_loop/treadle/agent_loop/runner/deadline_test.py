"""Deadlines and cancellation reach into tools, which end and free their places."""

import asyncio
from collections.abc import Awaitable, Mapping

import pytest

from treadle.agent_loop import (
    AgentTask,
    Drop,
    FailurePolicy,
    LoopLimits,
    Message,
    Retry,
    RolloutRunner,
    SamplingParams,
    Services,
    StopReason,
    Tool,
    ToolAgentLoop,
    ToolResult,
    ToolSpec,
    Trajectory,
    TrajectoryTimeoutError,
    default_loops,
)
from treadle.agent_loop.testing import ByteRenderer, FakeClock, ScriptedGenerator, ScriptedTool
from treadle.agent_loop.testing.fake_clock import let_pass

pytestmark = pytest.mark.asyncio
CALL = '<tool_call>{"name": "sandbox", "arguments": {"code": "x"}}</tool_call>'


class Sandbox:
    """A tool with places, in which a program runs for a minute of a clock that stands still."""

    spec = ToolSpec(name="sandbox", description="Runs code.")

    def __init__(self, num_places: int) -> None:
        self.clock = FakeClock()
        self.places = asyncio.Semaphore(num_places)
        self.num_running = 0
        self.num_ended = 0

    async def open(self, task: AgentTask) -> "Sandbox":
        return self

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        async with self.places:
            self.num_running += 1
            try:
                await self.clock.sleep(60.0)
            finally:
                self.num_running -= 1
                self.num_ended += 1
        return ToolResult(content="done")

    async def aclose(self) -> None:
        pass


def task(rollout_index: int = 0) -> AgentTask:
    return AgentTask(
        task_id="row",
        sample_index=0,
        rollout_index=rollout_index,
        loop="tool_agent",
        messages=(Message(role="user", content="hi"),),
    )


def services(script: list[str], tool: Tool) -> Services:
    return Services(
        generator=ScriptedGenerator(script),
        renderer=ByteRenderer(),
        limits=LoopLimits(max_response_tokens=1000, tool_timeout_s=300.0),
        sampling=SamplingParams(max_tokens=200),
        tools={tool.spec.name: tool},
    )


async def test_cancelling_a_trajectory_ends_its_tool_and_frees_the_place() -> None:
    sandbox = Sandbox(num_places=1)
    run = asyncio.create_task(ToolAgentLoop().run(task(), services([CALL], sandbox)))
    await sandbox.clock.until_sleeping(1)
    assert (sandbox.num_running, sandbox.places.locked()) == (1, True)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert (sandbox.num_running, sandbox.num_ended, sandbox.places.locked()) == (0, 1, False)
    assert sandbox.clock.now() == 0.0


async def run_group(
    kit: Services, size: int, stuck: Awaitable[None], *, failure_policy: FailurePolicy | None = None
) -> tuple[list[Trajectory], int]:
    """The trajectories in the order in which they ended, and the retries.

    The minute of the deadline passes when all but one have ended, and that one is stuck.
    """
    ended: list[Trajectory] = []
    others_ended = asyncio.Event()

    async def sink(trajectory: Trajectory) -> None:
        ended.append(trajectory)
        if len(ended) == size - 1:
            others_ended.set()

    runner = RolloutRunner(
        default_loops(),
        kit,
        max_in_flight=size,
        deadline_s=60.0,
        failure_policy=failure_policy or Drop(),
    )
    running = asyncio.create_task(runner.run([task(i) for i in range(size)], sink))
    await stuck
    if size > 1:
        await others_ended.wait()
    let_pass(60.0)
    return ended, (await running).num_retries


async def test_a_group_goes_on_without_its_straggler() -> None:
    """Three attempts at a row, two places: one attempt is stuck in a tool until its deadline."""
    sandbox = Sandbox(num_places=2)
    kit = services([CALL, "41", "42"], sandbox)
    ended, _ = await run_group(kit, 3, sandbox.clock.until_sleeping(1))
    assert [t.stop for t in ended] == [StopReason.FINISHED, StopReason.FINISHED, StopReason.ERROR]
    late = ended[-1].error
    assert isinstance(late, TrajectoryTimeoutError)
    assert "row" in str(late)
    assert "did not end within 60 s: session row/" in str(late)
    assert "was waiting for tools: ['sandbox'], after 1 completions" in str(late)
    assert (sandbox.num_running, sandbox.num_ended, sandbox.places.locked()) == (0, 1, False)


async def test_who_passed_the_deadline_is_not_attempted_again() -> None:
    sandbox = Sandbox(num_places=2)
    stuck = sandbox.clock.until_sleeping(1)
    ended, num_retries = await run_group(
        services([CALL], sandbox), 1, stuck, failure_policy=Retry(max_attempts=5)
    )
    assert isinstance(ended[0].error, TrajectoryTimeoutError)
    assert (num_retries, sandbox.num_ended) == (0, 1)


async def test_all_attempts_of_a_task_share_its_deadline() -> None:
    """The first fails for no fault of the model; the second has what is left of the time."""
    tool = ScriptedTool("sandbox", [ConnectionError("it is down"), asyncio.Event()])
    ended, num_retries = await run_group(
        services([CALL, CALL], tool), 1, tool.until_called(2), failure_policy=Retry(max_attempts=2)
    )
    assert isinstance(ended[0].error, TrajectoryTimeoutError)
    assert num_retries == 1


class Clinging(ScriptedTool):
    """Cannot be closed."""

    async def open(self, task: AgentTask) -> "Clinging":  # type: ignore[override]
        return self

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        return await self.take(arguments)

    async def aclose(self) -> None:
        await asyncio.Event().wait()


async def test_closing_a_tool_has_a_short_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LoopLimits(max_response_tokens=1).close_timeout_s == 5.0
    monkeypatch.setattr("treadle.agent_loop.loops.limits._CLOSE_S", 0.01)
    tool = Clinging("sandbox", [asyncio.Event()])
    ended, _ = await run_group(services([CALL], tool), 1, tool.until_called(1))
    assert isinstance(ended[0].error, TrajectoryTimeoutError)
