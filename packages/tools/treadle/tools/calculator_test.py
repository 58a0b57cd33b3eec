import pytest

from treadle.agent_loop import AgentTask, Message, SetupError, ToolFailure, ToolSpec
from treadle.tools import CalculatorTool

TASK = AgentTask(
    task_id="train/0",
    sample_index=0,
    rollout_index=0,
    loop="tool_agent",
    messages=(Message(role="user", content="What is 17 * 4?"),),
)


@pytest.mark.asyncio
async def test_it_gives_the_value_as_text() -> None:
    session = await CalculatorTool().open(TASK)
    assert (await session.call({"expression": "17 * 4"})).content == "68"
    assert (await session.call({"expression": "9/4"})).content == "2.25"
    await session.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"expression": "9**9**9"}, "Cannot evaluate: a value has more than 308 digits."),
        ({"expression": "1/0"}, "Cannot evaluate: division by zero."),
        ({}, "calculator takes the argument 'expression'; given: none."),
        ({"expr": "1"}, "calculator takes the argument 'expression'; given: 'expr'."),
        ({"expression": "1", "digits": 2}, "given: 'digits', 'expression'."),
        ({"expression": 7}, "The argument 'expression' must be a string, not 7."),
    ],
)
async def test_the_model_is_told_what_is_wrong(arguments: dict[str, object], told: str) -> None:
    session = await CalculatorTool().open(TASK)
    with pytest.raises(ToolFailure) as failure:
        await session.call(arguments)
    assert told in str(failure.value)


@pytest.mark.asyncio
async def test_it_answers_to_the_name_it_is_given() -> None:
    tool = CalculatorTool(spec=ToolSpec(name="calc", description="Compute."))
    session = await tool.open(TASK)
    with pytest.raises(ToolFailure, match=r"^calc takes"):
        await session.call({})


def test_settings_are_refused_since_there_are_none() -> None:
    with pytest.raises(SetupError, match="CalculatorTool has no settings; remove 'precision'"):
        CalculatorTool(config={"precision": 3})
