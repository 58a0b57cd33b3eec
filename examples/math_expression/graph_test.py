from collections.abc import Sequence

import pytest

from math_expression.graph import Encouraged
from treadle.agent_loop import (
    AgentTask,
    LoopLimits,
    Message,
    SamplingParams,
    Services,
    Tool,
    Trajectory,
)
from treadle.agent_loop.langgraph import ReactAgentLoop
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator
from treadle.trainer.demo.math_expression.tool import CalculateTool

TASK = AgentTask(
    task_id="t",
    sample_index=0,
    rollout_index=0,
    loop="react_agent",
    messages=(Message(role="user", content="Compute 3 @ 2 + 4."),),
)


def call(a: int, b: int, operand: str) -> str:
    arguments = f'{{"a": {a}, "b": {b}, "operand": "{operand}"}}'
    return f'<tool_call>\n{{"name": "calculate", "arguments": {arguments}}}\n</tool_call>'


REPLIES = (call(3, 2, "@"), call(5, 4, "+"), "#### 9")


async def run(loop: ReactAgentLoop, replies: Sequence[str], *tools: Tool) -> Trajectory:
    kit = Services(
        generator=ScriptedGenerator(replies),
        renderer=ByteRenderer(),
        limits=LoopLimits(max_response_tokens=1000),
        sampling=SamplingParams(max_tokens=500),
        tools={tool.spec.name: tool for tool in tools},
    )
    return await loop.run(TASK, kit)


@pytest.mark.asyncio
async def test_its_tokens_are_those_of_the_demos_tool() -> None:
    """The prompt too: the model was warm-started on the catalogue's schema."""
    ours = await run(Encouraged(), REPLIES)
    theirs = await run(ReactAgentLoop(), REPLIES, CalculateTool())
    assert ours.samples == theirs.samples
    assert ours.final_text == "#### 9"
    assert ours.num_turns == 6


@pytest.mark.asyncio
async def test_who_guesses_is_encouraged_once() -> None:
    trajectory = await run(Encouraged(), ["#### 3", *REPLIES])
    assert [m.content for m in trajectory.messages if m.role == "user"][1:] == ["Use the tool."]
    assert len(trajectory.samples) == 1
    stubborn = await run(Encouraged(), ["#### 3", "#### 2"])
    assert stubborn.final_text == "#### 2"


@pytest.mark.asyncio
async def test_a_wrong_operator_is_told_to_the_model() -> None:
    trajectory = await run(Encouraged(), [call(1, 2, "/"), "#### 0"])
    (answer,) = (m.content for m in trajectory.messages if m.role == "tool")
    assert answer == "Error executing tool 'calculate': operand is '/'; expected one of + - * @"
