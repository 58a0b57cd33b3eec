"""Tests of the toolbox: whose fault a call is, and how sessions are closed."""

import asyncio
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Self

import pytest

from treadle.agent_loop import (
    AgentTask,
    Image,
    LoopLimits,
    Message,
    ToolCall,
    ToolError,
    ToolFailure,
    ToolResult,
    ToolSpec,
    turning_limit,
    user_calls,
)
from treadle.agent_loop.testing import ByteRenderer
from treadle.agent_loop.testing.fake_clock import let_pass
from treadle.agent_loop.tools.toolbox import Toolbox

TASK = AgentTask(
    task_id="t",
    sample_index=0,
    rollout_index=0,
    loop="tool_agent",
    messages=(Message(role="user", content="hi"),),
)


class BareTool:
    """A tool that is its own session and gives or raises what it was made with."""

    def __init__(self, name: str = "lookup", result: object = None) -> None:
        self.spec = ToolSpec(name=name, description="Bare.")
        self.result = result

    async def open(self, task: AgentTask) -> Self:
        return self

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result  # type: ignore[return-value]

    async def aclose(self) -> None:
        pass


@pytest.fixture
def _closed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.agent_loop.loops.limits._CLOSE_S", 0.05)


class StuckTool(BareTool):
    async def aclose(self) -> None:
        await asyncio.Event().wait()


def toolbox(*tools: BareTool) -> Toolbox:
    limits = LoopLimits(max_response_tokens=1, max_parallel_calls=len(tools), tool_timeout_s=60.0)
    by_name = {tool.spec.name: tool for tool in tools}
    return Toolbox(TASK, by_name, limits, codec=ByteRenderer())


def call(name: str = "lookup") -> ToolCall:
    return ToolCall(id=f"call_{name}", name=name, arguments={})


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, r"TypeError: call\(\) must return a ToolResult, got None"),
        ("text", r"TypeError: call\(\) must return a ToolResult, got 'text'"),
        (ConnectionError("sandbox is down"), "ConnectionError: sandbox is down"),
        (TimeoutError("its own"), "TimeoutError: its own"),
        (RuntimeError("a \x1b]0;PWN\x07"), r"RuntimeError: a \\x1b\]0;PWN\\x07"),
        (asyncio.CancelledError(), "CancelledError, though nobody cancelled it"),
    ],
)
async def test_what_a_tool_does_wrong_names_the_tool_and_chains_the_cause(
    result: object, said: str
) -> None:
    """Spec A3.9 #10: a tool that gave None took a whole worker down."""
    async with toolbox(BareTool(result=result)) as box:
        with pytest.raises(ToolError, match=f"tool 'lookup': {said}") as failed:
            await box.run([call()])
    assert failed.value.__cause__ is not None
    assert failed.value.tool == "lookup"


def test_a_result_holds_text() -> None:
    """Spec A3.9 #4: a result within a result."""
    with pytest.raises(TypeError, match="content must be a string, got ToolResult"):
        ToolResult(content=ToolResult(content="nested"))  # type: ignore[arg-type]


def test_the_reward_of_a_result_is_a_number() -> None:
    with pytest.raises(ValueError, match="the reward is nan; it must be a finite number"):
        ToolResult(content="", reward=float("nan"))


class ClingingTool(BareTool):
    """Does not even end when its closing is cancelled, until it is cancelled once more."""

    async def aclose(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()


@pytest.mark.asyncio
@pytest.mark.usefixtures("_closed_soon")
async def test_a_tool_that_resists_its_closing_spoils_no_trajectory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    box = toolbox(ClingingTool("a", ToolResult(content="a")))
    async with box:
        await box.run([call("a")])
    assert ("tool/close_errors", 1) in [(m.name, m.value) for m in box.metrics]
    assert "task t: tool 'a' could not be closed: it did not end when it was" in caplog.text


@pytest.mark.asyncio
@pytest.mark.usefixtures("_closed_soon")
async def test_a_tool_that_resists_its_closing_swallows_no_cancellation() -> None:
    entered = asyncio.Event()

    async def use() -> None:
        async with toolbox(ClingingTool("a", ToolResult(content="a"))) as box:
            await box.run([call("a")])
            entered.set()
            await asyncio.Event().wait()

    user = asyncio.create_task(use())
    await entered.wait()
    user.cancel()
    with pytest.raises(asyncio.CancelledError):
        await user


@pytest.mark.asyncio
@pytest.mark.usefixtures("_closed_soon")
async def test_tools_that_hang_when_closed_are_counted_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All at once: one after the other would take longer than the shield lasts."""
    names = ("a", "b", "c", "d")
    box = toolbox(*(StuckTool(n, ToolResult(content=n)) for n in names))
    async with box:
        answers = await box.run([call(name) for name in names])
    assert [answer.message.content for answer in answers] == list(names)
    assert ("tool/close_errors", 4) in [(m.name, m.value) for m in box.metrics]
    assert all(f"task t: tool '{name}' could not be closed" in caplog.text for name in names)


class SwallowingTool(BareTool):
    """Goes on when its call is cancelled."""

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        let_pass(60.0)
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()


@pytest.mark.asyncio
async def test_a_call_that_swallows_its_cancellation_is_left_behind_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(user_calls, "GRACE_S", 0.01)
    box = toolbox(SwallowingTool("a", ToolResult(content="a")))
    async with box:
        (answer,) = await box.run([call("a")])
    assert "it did not end within 60 s" in answer.message.content
    counts = {(metric.name, metric.value) for metric in box.metrics}
    assert {("tool/timeouts", 1), ("tool/left_behind", 1)} <= counts
    assert "tool 'a' did not end within 0.01 s after it was cancelled" in caplog.text


class ExitingTool(BareTool):
    """Calls `exit()`, as code that a model wrote may."""

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        sys.exit(0)


@pytest.mark.asyncio
async def test_a_tool_that_calls_exit_is_an_error_of_the_tool() -> None:
    async with toolbox(ExitingTool("a", ToolResult(content="a"))) as box:
        with pytest.raises(ToolError, match="tool 'a': SystemExit: 0"):
            await box.run([call("a")])


def _later(seconds: float) -> float:
    return time.monotonic() + seconds


class BlockingTool(BareTool):
    """Holds the event loop for longer than the limit, as a `requests.get` may."""

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        let_pass(90.0)
        turning_limit._now = partial(_later, 90.0)
        return ToolResult(content="late")


@pytest.mark.asyncio
async def test_a_tool_that_blocks_times_out_none_of_its_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by a user: the one that raises and the quick ones were told of a time limit."""
    monkeypatch.setattr(turning_limit, "_now", time.monotonic)  # Also restored at the end.
    quick, broken = BareTool("a", ToolResult(content="a")), BareTool("c", KeyError("number"))
    async with toolbox(quick, BlockingTool("b"), broken) as box:
        quick_, blocking, broken_ = await asyncio.gather(
            *(box.run([call(name)]) for name in "abc"), return_exceptions=True
        )
        assert not isinstance(quick_, BaseException)
        assert not isinstance(blocking, BaseException)
        assert quick_[0].message.content == "a"
        assert "it did not end within 60 s" in blocking[0].message.content
        assert str(broken_).startswith("tool 'c': KeyError: 'number'")


@pytest.mark.asyncio
async def test_a_failure_shows_its_images_and_says_something() -> None:
    image = Image(data=b"p", mime="image/png")
    tools = (
        BareTool("a", ToolFailure("no <image>", images=(image,))),
        BareTool("b", ToolFailure("")),
    )
    async with toolbox(*tools) as box:
        a, b = (answer.message for answer in await box.run([call("a"), call("b")]))
    assert (a.content, a.images) == ("Error executing tool 'a': no  ", (image,))
    assert b.content == "Error executing tool 'b': it failed and gave no reason"
