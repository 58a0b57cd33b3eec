"""The parsers in a tool loop: tools, prompt and malformed calls reach those who need them."""

import pytest

from treadle.agent_loop import (
    AgentTask,
    LoopLimits,
    Message,
    SamplingParams,
    Services,
    ToolAgentLoop,
    Trajectory,
    function_tool,
)
from treadle.agent_loop.parsers import parser_named
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator


@function_tool
async def repeat(text: str, times: int) -> str:
    """Repeats.

    Args:
        text: What.
        times: How often.
    """
    return " ".join([text] * times)


async def run(parser: str, *replies: str) -> Trajectory:
    services = Services(
        generator=ScriptedGenerator(replies),
        renderer=ByteRenderer(parser_named(parser)),
        limits=LoopLimits(max_response_tokens=10_000),
        sampling=SamplingParams(max_tokens=1000),
        tools={"repeat": repeat},
    )
    task = AgentTask(
        task_id="t",
        sample_index=0,
        rollout_index=0,
        loop="tool_agent",
        messages=(Message(role="user", content="Say 3 three times."),),
    )
    return await ToolAgentLoop().run(task, services)


CALL = (
    "<tool_call>\n<function=repeat>\n<parameter=text>\n3\n</parameter>\n"
    "<parameter=times>\n3\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.asyncio
async def test_arguments_are_read_by_the_schema_of_the_tool() -> None:
    trajectory = await run("qwen3_coder", CALL, "Done.")
    assert trajectory.messages[1].tool_calls[0].arguments == {"text": "3", "times": 3}
    assert trajectory.messages[2].content == "3 3 3"


@pytest.mark.asyncio
async def test_reasoning_is_set_apart_in_messages_and_stays_in_the_tokens() -> None:
    trajectory = await run("qwen3_5", f"<think>\nI call.\n</think>\n\n{CALL}", "Done.")
    assert trajectory.messages[1].reasoning == "I call."
    assert (trajectory.messages[1].content, trajectory.final_text) == ("", "Done.")
    assert b"I call." in bytes(token for token in trajectory.tokens.ids if token < 256)


@pytest.mark.asyncio
async def test_a_malformed_call_is_counted_with_its_text_and_answered_under_an_id() -> None:
    trajectory = await run("kimi", "<|tool_call_begin|>functionsrepeat5<|tool_call_end|>", "Oh.")
    (finding,) = trajectory.findings
    assert finding.kind == "malformed_call"
    assert "functionsrepeat5" in finding.text
    answer = trajectory.messages[2]
    assert answer.tool_call_id == "functionsrepeat5"
    assert "the id must be functions.NAME:NUMBER" in answer.content
