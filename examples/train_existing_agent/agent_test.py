"""The agent by itself, and captured: the same tokens as an agent loop of ours would have."""

import sys
from pathlib import Path

import pytest

from train_existing_agent.loop import ExpressionAgent
from treadle.agent_loop import (
    AgentTask,
    LoopLimits,
    Message,
    SamplingParams,
    Services,
    ToolAgentLoop,
    default_loops,
)
from treadle.agent_loop.proxy import ProxyAgentLoop
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator
from treadle.trainer.config.load import load_config
from treadle.trainer.demo.math_expression.tool import CalculateTool

HERE = Path(__file__).parent
TASK = AgentTask(
    task_id="t",
    sample_index=0,
    rollout_index=0,
    loop="react_agent",
    messages=(
        Message(role="system", content="End with #### <answer>."),
        Message(role="user", content="Compute 3 @ 2 + 4."),
    ),
)


def call(a: int, b: int, operand: str) -> str:
    arguments = f'{{"a": {a}, "b": {b}, "operand": "{operand}"}}'
    return f'<tool_call>\n{{"name": "calculate", "arguments": {arguments}}}\n</tool_call>'


REPLIES = (call(3, 2, "@"), call(5, 4, "+"), "#### 9")


def services(*replies: str) -> Services:
    return Services(
        generator=ScriptedGenerator(replies),
        renderer=ByteRenderer(),
        limits=LoopLimits(max_response_tokens=1000),
        sampling=SamplingParams(max_tokens=500),
        tools={"calculate": CalculateTool()},
    )


@pytest.mark.asyncio
async def test_its_tokens_are_those_of_our_own_loop() -> None:
    theirs = await ExpressionAgent().run(TASK, services(*REPLIES))
    ours = await ToolAgentLoop().run(TASK, services(*REPLIES))
    assert theirs.samples == ours.samples
    assert theirs.final_text == "#### 9"
    assert (theirs.stop, theirs.num_turns) == (ours.stop, ours.num_turns)


@pytest.mark.asyncio
async def test_it_runs_unchanged_as_a_program_too() -> None:
    program = [sys.executable, str(HERE / "expression_agent.py"), "Compute 3 @ 2 + 4."]
    trajectory = await ProxyAgentLoop(program).run(TASK, services(*REPLIES))
    assert trajectory.final_text == "#### 9"
    assert len(trajectory.samples) == 1


@pytest.mark.asyncio
async def test_a_wrong_call_is_told_to_the_model() -> None:
    wrong = '<tool_call>\n{"name": "calculate", "arguments": {"x": 1}}\n</tool_call>'
    trajectory = await ExpressionAgent().run(TASK, services(wrong, call(1, 2, "/"), "#### 0"))
    told = [m.content for m in trajectory.messages if m.role == "tool"]
    assert "unexpected keyword argument 'x'" in told[0]
    assert told[1] == "Error: operand is '/'; expected one of + - * @"


def test_the_configuration_names_the_loop() -> None:
    config = load_config([HERE / "config.yaml"], []).config
    assert all(path.exists() for path in (*config.data.train_files, *config.data.val_files))
    loops = default_loops().adding("react_agent", config.agent.loops["react_agent"])
    assert isinstance(loops.resolve("react_agent"), ExpressionAgent)
