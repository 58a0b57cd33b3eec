import asyncio
from typing import Literal

import pytest
from langchain_core.tools import tool
from langgraph.types import Command
from pydantic import BaseModel

from treadle.agent_loop import (
    AgentTask,
    Image,
    Message,
    ToolCall,
    ToolFailure,
    ToolResult,
    ToolSpec,
    function_tool,
)
from treadle.agent_loop.langgraph import LangChainTool, TrajectoryTool, tool_spec

_TASK = AgentTask(
    task_id="t",
    sample_index=0,
    rollout_index=0,
    loop="react_agent",
    messages=(Message(role="user", content="hi"),),
)


@tool
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def test_the_model_is_told_langchains_schema() -> None:
    assert tool_spec(add) == ToolSpec(
        name="add",
        description="Add two numbers.",
        parameters={
            "properties": {"a": {"type": "integer"}, "b": {"default": 1, "type": "integer"}},
            "required": ["a"],
            "type": "object",
        },
    )


def test_anything_that_langchain_takes_for_a_tool_has_a_spec() -> None:
    class Search(BaseModel):
        """Search."""

        where: Literal["here", "there"]

    def plain(x: int) -> int:
        """Do nothing."""
        return x

    assert tool_spec(Search).name == "Search"
    assert tool_spec(plain).parameters["required"] == ["x"]
    schema = tool_spec(add).as_schema()
    assert tool_spec(schema) == tool_spec(add)


def test_our_own_tool_keeps_its_schema_key_for_key() -> None:
    @function_tool
    async def look(place: str, deep: bool | None = None) -> str:
        """Look somewhere.

        Args:
            place: Where.
            deep: Whether to look twice.
        """
        return place

    async def answer(call: ToolCall) -> Message:
        return Message(role="tool", content=f"{call.name} {call.arguments}")

    shown = TrajectoryTool.of(look.spec, answer)
    assert tool_spec(shown).as_schema() == look.spec.as_schema()
    assert list(tool_spec(shown).parameters) == list(look.spec.parameters)
    assert asyncio.run(shown.ainvoke({"place": "x"})) == "look {'place': 'x'}"
    with pytest.raises(NotImplementedError, match="call the graph with ainvoke"):
        shown.invoke({"place": "x"})


async def _call(langchain_tool: object, **arguments: object) -> ToolResult:
    ours = LangChainTool(langchain_tool)  # type: ignore[arg-type]
    session = await ours.open(_TASK)
    try:
        return await session.call(arguments)
    finally:
        await session.aclose()


@pytest.mark.asyncio
async def test_plain_and_async_tools_answer_with_text() -> None:
    @tool
    async def listing() -> list[int]:
        """List numbers."""
        return [1, 2]

    assert await _call(add, a=2) == ToolResult(content="3")
    assert await _call(listing) == ToolResult(content="[1, 2]")


@pytest.mark.asyncio
async def test_images_in_an_answer_are_kept() -> None:
    @tool
    async def photo() -> list[dict[str, str]]:
        """Take a photo."""
        return [
            {"type": "text", "text": "there:"},
            {"type": "image", "base64": "AAAA", "mime_type": "image/png"},
        ]

    result = await _call(photo)
    assert result == ToolResult(
        content="there:<image>", images=(Image(data=b"\0\0\0", mime="image/png"),)
    )


@pytest.mark.asyncio
async def test_arguments_that_do_not_fit_are_the_models_fault() -> None:
    with pytest.raises(ToolFailure, match="argument a: Field required"):
        await _call(add)


@pytest.mark.asyncio
async def test_data_of_the_tools_own_that_does_not_fit_is_ours() -> None:
    class Row(BaseModel):
        size: int

    @tool
    async def load() -> str:
        """Load a row."""
        return str(Row.model_validate({"size": "large"}))

    with pytest.raises(ValueError, match="validation error for Row"):
        await _call(load)


@pytest.mark.asyncio
async def test_a_command_is_refused() -> None:
    @tool
    async def jump() -> Command[str]:
        """Go elsewhere."""
        return Command(goto="x")

    with pytest.raises(TypeError, match="tool 'jump' gave a Command"):
        await _call(jump)
