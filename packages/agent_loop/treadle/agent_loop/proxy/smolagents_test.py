"""smolagents, an agent framework that nobody here wrote, captured as it is.

It rewrites its history: calls and results come back as text of its own. So its turns fork, and each
is trained once.
"""

import asyncio
import json

import pytest
from smolagents import CodeAgent, OpenAIModel, Tool, ToolCallingAgent

from treadle.agent_loop import (
    AgentTask,
    LoopLimits,
    Message,
    SamplingParams,
    Services,
    StopReason,
    Trajectory,
)
from treadle.agent_loop.proxy import AgentSession, ProxyAgentLoop
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator

pytestmark = pytest.mark.asyncio

TASK = AgentTask(
    task_id="t",
    sample_index=0,
    rollout_index=0,
    loop="smolagents",
    messages=(Message(role="user", content="What is 6 * 7?"),),
)


class Multiply(Tool):  # type: ignore[misc]
    name = "multiply"
    description = "Multiplies two numbers."
    inputs = {  # noqa: RUF012  (smolagents' own form)
        "a": {"type": "number", "description": "One."},
        "b": {"type": "number", "description": "The other."},
    }
    output_type = "number"

    def forward(self, a: float, b: float) -> float:
        return a * b


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def train(kind: type, *replies: str) -> tuple[Trajectory, ScriptedGenerator]:
    generator = ScriptedGenerator(replies)

    def solve(session: AgentSession) -> float:
        model = OpenAIModel(
            "policy", api_base=session.base_url, api_key=session.api_key, tool_choice="auto"
        )
        agent = kind(tools=[Multiply()], model=model, max_steps=4, verbosity_level=0)
        question = session.task.messages[0].content
        return float(str(agent.run(question)) == "42")

    async def agent(session: AgentSession) -> float:
        return await asyncio.to_thread(solve, session)

    kit = Services(
        generator=generator,
        renderer=ByteRenderer(),
        limits=LoopLimits(max_response_tokens=4000),
        sampling=SamplingParams(max_tokens=1000, temperature=1.0),
    )
    return await ProxyAgentLoop(agent).run(TASK, kit), generator


def trained(trajectory: Trajectory) -> list[str]:
    return [
        ByteRenderer().decode([t for t, on in zip(s.ids, s.loss_mask, strict=True) if on])
        for s in trajectory.samples
    ]


async def test_1_a_tool_calling_agent() -> None:
    said = [call("multiply", a=6, b=7), call("final_answer", answer="42")]
    trajectory, generator = await train(ToolCallingAgent, *said)
    assert trajectory.reward == 1.0
    assert trajectory.stop is StopReason.FINISHED
    assert trained(trajectory) == [f"{text}<end>" for text in said]
    assert "42" in ByteRenderer().decode(generator.requests[1].prompt)
    assert {m.name: m.value for m in trajectory.metrics}["capture/samples"] == 2


async def test_2_a_code_agent_with_its_stop_strings() -> None:
    said = [
        "Thought: I multiply.\n<code>\nx = multiply(a=6, b=7)\nprint(x)\n</code>",
        "Thought: It is known.\n<code>\nfinal_answer(int(42))\n</code>",
    ]
    trajectory, _ = await train(CodeAgent, *(f"{text} and so on" for text in said))
    assert trajectory.reward == 1.0
    assert trained(trajectory) == said
    assert {m.name: m.value for m in trajectory.metrics}["capture/tokens_past_stop"] == 22
