"""Tests of function tools: schemas, argument checks, plain and async functions."""

import functools
from typing import Literal

import pytest

from treadle.agent_loop import AgentTask, Message, ToolFailure, ToolResult, function_tool

TASK = AgentTask(
    task_id="t",
    sample_index=0,
    rollout_index=0,
    loop="tool_agent",
    messages=(Message(role="user", content="hi"),),
)


@function_tool
async def weather(
    city: str, days: int = 1, unit: Literal["C", "F"] = "C", tags: list[str] | None = None
) -> str:
    """Tells the weather.

    Looks it up.

    Args:
        city: Name of the city.
        days: How many days
            ahead.

    Returns:
        A text.
    """
    return f"{city} {days} {unit} {tags}"


@function_tool
def plain(x: float, flag: bool = False) -> ToolResult:
    """Doubles."""
    if x < 0:
        raise ToolFailure("x must not be negative")
    return ToolResult(content=str(2 * x), reward=1.0)


def test_the_schema_is_the_signature_and_the_docstring() -> None:
    assert weather.spec.as_schema() == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.\n\nLooks it up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of the city."},
                    "days": {"type": "integer", "description": "How many days ahead."},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                    "tags": {"type": "array", "items": {"type": "string"}, "nullable": True},
                },
                "required": ["city"],
            },
        },
    }


@pytest.mark.asyncio
async def test_calls_reach_the_function() -> None:
    session = await weather.open(TASK)
    result = await session.call({"city": "Bonn", "tags": ["a"]})
    assert result == ToolResult(content="Bonn 1 C ['a']")
    assert (await plain.call({"x": 2})).content == "4"
    assert (await weather.call({"city": "Bonn", "days": 3.0})).content == "Bonn 3 C None"
    await session.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "missing argument: city"),
        ({"city": "x", "day": 1}, "unknown argument: day; known: city, days, unit, tags"),
        ({"city": 3}, "argument city is 3; expected string"),
        ({"city": "x", "days": True}, "argument days is True; expected integer"),
        ({"city": "x", "days": 1.5}, "expected integer"),
        ({"city": "x", "unit": "K"}, r"expected one of \['C', 'F'\]"),
        ({"city": "x", "tags": [1]}, "expected array or null"),
        ({"city": None}, "expected string"),
    ],
)
async def test_arguments_that_do_not_fit_are_the_models_fault(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ToolFailure, match=message):
        await weather.call(arguments)


@pytest.mark.asyncio
async def test_a_failure_of_the_function_passes() -> None:
    with pytest.raises(ToolFailure, match="must not be negative"):
        await plain.call({"x": -1})


@pytest.mark.asyncio
async def test_a_plain_wrapper_of_an_async_function_is_awaited() -> None:
    @functools.wraps(weather.function)
    def wrapper(**arguments: object) -> object:
        return weather.function(**arguments)

    wrapped = function_tool(wrapper)  # type: ignore[arg-type]
    assert (await wrapped.call({"city": "Bonn"})).content == "Bonn 1 C None"


def test_functions_that_cannot_be_described_are_refused() -> None:
    def silent(x: int) -> str:
        return ""

    def untyped(x) -> str:  # type: ignore[no-untyped-def]
        """Does."""
        return ""

    def odd(x: set[int]) -> str:
        """Does."""
        return ""

    def bare(x: list) -> str:  # type: ignore[type-arg]
        """Does."""
        return ""

    def positional(x: int, /) -> str:
        """Does."""
        return ""

    with pytest.raises(TypeError, match="silent has no docstring"):
        function_tool(silent)
    with pytest.raises(TypeError, match="'x' of untyped needs a type"):
        function_tool(untyped)
    for unknown in (odd, bare):
        with pytest.raises(TypeError, match="which is not supported"):
            function_tool(unknown)
    with pytest.raises(TypeError, match="'x' of positional needs a type hint and"):
        function_tool(positional)


@pytest.mark.asyncio
async def test_an_integer_that_no_float_holds_is_the_models_fault() -> None:
    @function_tool
    def half(x: float) -> str:
        """Halves."""
        return str(x / 2)

    assert (await half.call({"x": 3})).content == "1.5"
    with pytest.raises(ToolFailure, match=r"argument x is 1000.*; expected number"):
        await half.call({"x": 10**400})
