"""The toolbox: the tools of one trajectory, opened at their first call and closed at its end.

Invariant: an error of the model's call becomes a text for the model (the texts are verl's); an
error of the tool leaves as `ToolError`. Calls of one turn run concurrently; answers keep their
order. A session is closed once, shielded from cancellation, within `LoopLimits.close_timeout_s`.

The loop waits in `run`; cancelling it cancels every call. A call that does not end then is left
behind and counted (`user_calls`).
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

from treadle.agent_loop.aio import concurrently
from treadle.agent_loop.errors import SetupError, ToolError, boundary
from treadle.agent_loop.loops.limits import LoopLimits
from treadle.agent_loop.tokens.renderer import MalformedCall
from treadle.agent_loop.tools.class_tools import ClassSession, MethodTool, ToolClass
from treadle.agent_loop.tools.metric_rules import COUNTS, other_rule
from treadle.agent_loop.tools.session_cleanup import close_all
from treadle.agent_loop.tools.text_truncation import TextCodec
from treadle.agent_loop.tools.tool import Tool, ToolFailure, ToolResult, ToolSession
from treadle.agent_loop.trajectory import Score
from treadle.agent_loop.turning_limit import TurningLimit
from treadle.agent_loop.types import IMAGE_MARK, AgentTask, Image, Message, ToolCall, ToolSpec
from treadle.agent_loop.user_calls import end_if_cancelled
from treadle.tracing import Metric, Reduce, SpanHandle, span

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """The answer to one request.

    Attributes:
        message: The message for the model, truncated to the limits.
        stop: Whether the tool ends the trajectory.
    """

    message: Message
    stop: bool


def selected_tools(task: AgentTask, tools: Mapping[str, Tool]) -> Mapping[str, Tool]:
    """Returns the tools that the task's row selects, or all tools if it has no selection.

    Args:
        task: `fields["extra_info"]["tool_selection"]` is a list of names, None or absent.

    Raises:
        SetupError: The selection is not a list of names, or names an unknown tool.
    """
    extra = task.fields.get("extra_info")
    names = extra.get("tool_selection") if isinstance(extra, Mapping) else None
    if names is None:
        return tools
    if (
        not isinstance(names, Sequence)
        or isinstance(names, str)
        or not all(isinstance(name, str) for name in names)
    ):
        raise SetupError(
            f"task {task.task_id!r}: tool_selection must be a list of names, got {names!r:.80}"
        )
    if unknown := [name for name in names if name not in tools]:
        raise SetupError(
            f"task {task.task_id!r}: tool_selection names {unknown}, which are not configured; "
            f"configured tools: {sorted(tools)}"
        )
    return {name: tool for name, tool in tools.items() if name in names}


class Toolbox:
    """The tools of one trajectory.

    Args:
        limits: Bounds of tool texts, of time and of calls per turn.
        codec: Counts the tokens of texts; usually the renderer.
    """

    def __init__(
        self, task: AgentTask, tools: Mapping[str, Tool], limits: LoopLimits, *, codec: TextCodec
    ) -> None:
        self._task = task
        self._tools = tools
        self._limits = limits
        self._codec = codec
        self._sessions: dict[str, ToolSession | ClassSession] = {}  # by `_owner`
        self._opening = asyncio.Lock()
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._metrics: list[Metric] = []
        self._rules: dict[str, Reduce] = {}
        self.rewards: list[float] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._sessions:
            await close_all(
                self._sessions,
                error=ToolError,
                timeout_s=self._limits.close_timeout_s,
                report_leak=self._report_leak,
            )

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The descriptions of the tools for the model."""
        return tuple(tool.spec for tool in self._tools.values())

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The tools' own metrics, then the counts and the seconds of this trajectory."""
        counts = (Metric(f"tool/{name}", self._counts[name], Reduce.SUM) for name in COUNTS)
        seconds = Metric("agent_loop/tool_calls_s", self._seconds, Reduce.MEAN)
        return (*self._metrics, *counts, seconds)

    async def run(self, requests: Sequence[ToolCall | MalformedCall]) -> list[ToolAnswer]:
        """Answers the first `max_parallel_calls` requests, in their order.

        Raises:
            ToolError: A tool failed and the model is not at fault.
        """
        taken = requests[: self._limits.max_parallel_calls]
        self._counts["over_cap"] += len(requests) - len(taken)
        started = time.perf_counter()
        await self._open(r.name for r in taken if isinstance(r, ToolCall))
        results = await concurrently(map(self._answer, taken))
        self._seconds += time.perf_counter() - started
        for message, result in results:
            self.rewards.append(result.reward)
            if not result.metrics:
                continue
            wrong = other_rule(result.metrics, self._tools, self._rules)
            if wrong is not None:
                with _named(message.name or ""):
                    raise ToolError(f"tool {message.name!r}: {wrong}")
            self._metrics.extend(result.metrics)
        return [ToolAnswer(message=message, stop=result.stop) for message, result in results]

    async def reward(self) -> Score | None:
        """Returns the reward that an instance of a class of tools gives its trajectory, if one has.

        Raises:
            ToolError: It raised, or returned something else.
        """
        methods = ((n, tool) for n, tool in self._tools.items() if isinstance(tool, MethodTool))
        scoring = [name for name, tool in methods if tool.owner.scores]
        if not scoring:
            return None
        await self._open(scoring[:1])
        what, _ = self._owner(scoring[0])
        session = self._sessions[what]
        assert isinstance(session, ClassSession), "it is of a class"
        with boundary(ToolError, f"the reward of {what}"):
            async with TurningLimit(self._limits.tool_timeout_s) as limit:
                return await self._end(what, limit.own(session.reward()))

    def _owner(self, name: str) -> tuple[str, Tool | ToolClass]:
        """Returns what is opened for a tool, with its name in errors: the tool, or its class."""
        tool = self._tools[name]
        if isinstance(tool, MethodTool):
            return str(tool.owner), tool.owner
        return f"tool {name!r}", tool

    async def _open(self, names: Iterable[str]) -> None:
        """Opens what the known ones among some tools need, and have not yet."""
        async with self._opening:  # an agent may call `run` concurrently
            missing = {self._owner(name)[0]: name for name in names if name in self._tools}
            await concurrently(
                self._open_one(name) for what, name in missing.items() if what not in self._sessions
            )

    async def _open_one(self, name: str) -> None:
        what, owner = self._owner(name)
        with _named(name), boundary(ToolError, f"{what} could not be opened"):
            async with TurningLimit(self._limits.tool_timeout_s) as limit:
                self._sessions[what] = await self._end(what, limit.own(owner.open(self._task)))

    async def _answer(self, request: ToolCall | MalformedCall) -> tuple[Message, ToolResult]:
        if isinstance(request, MalformedCall):
            result = ToolResult(content=_malformed_text(request))
        else:
            result = await self._call(request)
        message = Message(
            role="tool",
            content=self._shown(result),
            tool_call_id=request.id,
            name=request.name,
            images=result.images,
        )
        return message, result

    def _shown(self, result: ToolResult) -> str:
        """Returns the truncated text; if it is cut, its image marks are removed."""
        text = self._limits.truncate_tool_text(result.content, self._codec)
        if not result.images or text == result.content:
            return text
        # A space replaces each mark: the text around it might form another mark otherwise.
        plain = result.content.replace(IMAGE_MARK, " ")
        return self._limits.truncate_tool_text(plain, self._codec)

    async def _call(self, call: ToolCall) -> ToolResult:
        self._counts["calls"] += 1
        if call.name not in self._tools:
            self._counts["unknown"] += 1
            known = sorted(self._tools)
            return ToolResult(content=f"Unknown function '{call.name}'. Available tools: {known}")
        opened = self._sessions[self._owner(call.name)[0]]
        session = opened.method(call.name) if isinstance(opened, ClassSession) else opened
        with span("tool", tool=call.name, inputs=call.arguments) as trace:
            result = await self._result(call, session, trace)
            if trace.recording:
                trace.set(output=_output(result))
            return result

    async def _result(self, call: ToolCall, session: ToolSession, trace: SpanHandle) -> ToolResult:
        limit_s = self._limits.tool_timeout_s
        limit = TurningLimit(limit_s)
        try:
            with _named(call.name), boundary(ToolError, f"tool {call.name!r}"):
                try:
                    async with limit:
                        work = limit.own(session.call(call.arguments))
                        result = await self._end(f"tool {call.name!r}", work)
                    return _checked(result)
                except ToolFailure as failure:
                    self._counts["failures"] += 1
                    trace.set(failure=str(failure))
                    return _failed(call, str(failure), failure.images)
        except ToolError:
            if not limit.expired:
                raise
            self._counts["timeouts"] += 1
            trace.set(failure="timeout")
            return _failed(call, f"it did not end within {limit_s:g} s")

    async def _end(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        """Awaits a tool, which cannot outlive the call for longer than its grace."""
        count = partial(self._counts.update, ["left_behind"])
        return await end_if_cancelled(what, work, on_left_behind=count)

    def _report_leak(self, what: str) -> None:
        """Logs and counts a session that could not be closed."""
        self._counts["close_errors"] += 1
        _log.warning("task %s: %s", self._task.task_id, what)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Adds the tool's name to its error."""
    try:
        yield
    except ToolError as error:
        error.tool = name
        raise


def _checked(result: object) -> ToolResult:
    """Checks what a tool returned, so that a broken tool fails at this boundary."""
    if not isinstance(result, ToolResult):
        raise TypeError(f"call() must return a ToolResult, got {result!r:.80}")
    return result


def _output(result: ToolResult) -> dict[str, object]:
    """Returns a tool's answer for its span, before it is truncated; images by their type."""
    output: dict[str, object] = {
        "content": result.content,
        "reward": result.reward,
        "stop": result.stop,
    }
    if result.images:
        output["images"] = [image.mime for image in result.images]
    return output


def _failed(call: ToolCall, reason: str, images: tuple[Image, ...] = ()) -> ToolResult:
    # A mark in the reason does not stand for an image.
    reason = reason.replace(IMAGE_MARK, " ") if images else reason
    return ToolResult(content=f"Error executing tool '{call.name}': {reason}", images=images)


def _malformed_text(bad: MalformedCall) -> str:
    if bad.name is not None:
        return f"Invalid call of '{bad.name}': {bad.reason}"
    return f"Invalid tool call: {bad.reason}"
