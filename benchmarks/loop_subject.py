"""One loop, one tool, and an engine in this process that costs nothing."""

import asyncio
from collections.abc import Sequence

from null_server import Script, Sessions

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


class InProcess:
    """The null engine as a generator.

    Args:
        script: Of all sessions.
    """

    def __init__(self, script: Script) -> None:
        self._sessions = Sessions(script)

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
        return reply(self._sessions.next_ids(request.session_id), params)

    def finish_session(self, session_id: str) -> None:
        """Has nothing to free."""


async def run_loop(generator: TokenGenerator, tasks: Sequence[int]) -> list[Trajectory]:
    """Runs the given trajectories at a time, with the package's own loop."""
    services = Services(
        generator=generator,
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
    found: list[Trajectory] = []

    async def sink(trajectory: Trajectory) -> None:
        found.append(trajectory)

    await runner.run([make_task(number) for number in tasks], sink)
    return found


def make_task(number: int) -> AgentTask:
    """A row."""
    return AgentTask(
        task_id=f"row-{number}",
        sample_index=number,
        rollout_index=0,
        loop="tool_agent",
        messages=(Message(role="user", content="What is 17 + 25? Use the tool."),),
    )
