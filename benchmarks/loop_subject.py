"""The subject of `loop_overhead`: one loop, one tool, and an engine that costs nothing."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from treadle.agent_loop import (
    AgentTask,
    Completion,
    FailFast,
    LoopLimits,
    Message,
    PlacedImage,
    RequestContext,
    RolloutRunner,
    SamplingParams,
    Services,
    TokenGenerator,
    Trajectory,
    default_loops,
    function_tool,
)
from treadle.agent_loop.testing import ByteRenderer
from treadle.agent_loop.testing.byte_renderer import END, encode
from treadle.agent_loop.testing.scripted import reply

CALL = (*encode('<tool_call>{"name": "add", "arguments": {"a": 17, "b": 25}}</tool_call>'), END)
LAST = (*encode("The answer is 42."), END)


@function_tool
async def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a + b)


class Script:
    """The null engine: `turns - 1` tool calls and an answer, for each session."""

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._calls: Counter[str] = Counter()

    def ids(self, session_id: str) -> tuple[int, ...]:
        """The session's next completion."""
        self._calls[session_id] += 1
        if self._calls[session_id] < self._turns:
            return CALL
        del self._calls[session_id]
        return LAST


class InProcess:
    """The null engine as a generator."""

    def __init__(self, turns: int) -> None:
        self._script = Script(turns)

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request: RequestContext,
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        """Replies at once, after the others that are ready."""
        await asyncio.sleep(0)
        return reply(self._script.ids(request.session_id), params)

    def finish_session(self, session_id: str) -> None:
        """Has nothing to free."""


@dataclass(slots=True)
class Timed:
    """A generator that notes how long each turn takes."""

    inner: TokenGenerator
    turns_s: list[float] = field(default_factory=list)
    _asked: dict[str, float] = field(default_factory=dict)

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request: RequestContext,
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        """Asks the generator within."""
        now = time.perf_counter()
        if (before := self._asked.get(request.session_id)) is not None:
            self.turns_s.append(now - before)
        self._asked[request.session_id] = now
        return await self.inner.generate(prompt, params, request=request)

    def finish_session(self, session_id: str) -> None:
        """Passes it on."""
        self._asked.pop(session_id, None)
        self.inner.finish_session(session_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a batch gave.

    Attributes:
        samples: Ids and loss mask of each trajectory.
        turns_s: How long each turn took.
    """

    samples: list[tuple[tuple[int, ...], tuple[bool, ...]]]
    turns_s: list[float]


async def run_loop(generator: TokenGenerator, tasks: Sequence[int]) -> Result:
    """Runs the given number of trajectories at a time, with the package's own loop."""
    timed = Timed(generator)
    services = Services(
        generator=timed,
        renderer=ByteRenderer(),
        limits=LoopLimits(max_response_tokens=4096),
        sampling=SamplingParams(max_tokens=256, temperature=1.0, stop_token_ids=(END,)),
        tools={"add": add},
    )
    runner = RolloutRunner(
        default_loops(),
        services,
        max_in_flight=max(1, len(tasks)),
        deadline_s=600,
        failure_policy=FailFast(),
    )
    samples = []

    async def sink(trajectory: Trajectory) -> None:
        samples.append((tuple(trajectory.tokens.ids), tuple(trajectory.tokens.loss_mask)))

    await runner.run([make_task(number) for number in tasks], sink)
    return Result(samples=samples, turns_s=timed.turns_s)


def make_task(number: int) -> AgentTask:
    """A row."""
    return AgentTask(
        task_id=f"row-{number}",
        sample_index=number,
        rollout_index=0,
        loop="tool_agent",
        messages=(Message(role="user", content="What is 17 + 25? Use the tool."),),
    )


Run: TypeAlias = Callable[[int], Awaitable[Result]]
"""Runs the given number of trajectories."""
