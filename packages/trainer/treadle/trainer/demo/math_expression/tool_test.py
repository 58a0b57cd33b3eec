from pathlib import Path

import pytest

from treadle.agent_loop import AgentTask, Message, SetupError, ToolFailure
from treadle.tools import load_catalogue
from treadle.trainer.demo.math_expression.tool import SPEC, CalculateTool

_TASK = AgentTask(
    task_id="t",
    sample_index=0,
    rollout_index=0,
    loop="react_agent",
    messages=(Message(role="user", content="Compute 3 @ 2."),),
)


async def _calculate(**arguments: object) -> str:
    session = await CalculateTool().open(_TASK)
    result = await session.call(arguments)
    await session.aclose()
    return result.content


@pytest.mark.asyncio
async def test_it_applies_each_operator() -> None:
    assert await _calculate(a=3, b=2, operand="@") == "5"
    assert await _calculate(a=1, b=9, operand="@") == "-15"
    assert await _calculate(a=-3, b=2, operand="+") == "-1"
    assert await _calculate(a=3, b=5, operand="-") == "-2"
    assert await _calculate(a=10**30, b=10, operand="*") == str(10**31)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"a": 1, "operand": "+"}, "b is None; expected a whole number"),
        ({"a": 1.5, "b": 2, "operand": "+"}, "a is 1.5; expected a whole number"),
        ({"a": True, "b": 2, "operand": "+"}, "a is True; expected a whole number"),
        ({"a": 1, "b": "2", "operand": "+"}, "b is '2'; expected a whole number"),
        ({"a": 1, "b": 2, "operand": "/"}, r"operand is '/'; expected one of \+ - \* @"),
        ({"a": 1, "b": 2}, "operand is None; expected one of"),
        ({"a": 1, "b": 2, "operand": ["@"]}, r"operand is \['@'\]; expected one of"),
    ],
)
async def test_wrong_arguments_are_told_to_the_model(
    arguments: dict[str, object], reason: str
) -> None:
    with pytest.raises(ToolFailure, match=reason):
        await _calculate(**arguments)


def test_the_catalogue_says_what_the_tool_says() -> None:
    tool = load_catalogue(Path(__file__).parent / "tools.yaml")["calculate"]
    assert isinstance(tool, CalculateTool)
    assert tool.spec == SPEC
    assert list(tool.spec.parameters) == list(SPEC.parameters)


def test_it_has_no_settings() -> None:
    with pytest.raises(SetupError, match="no settings; remove precision"):
        CalculateTool(config={"precision": 3})
