import random

from calculator.demonstrations import answered_with_tool, drill, habit, tool_use
from calculator.questions import TEMPLATES, Split, make_question, sample_question
from calculator.recipe import CALCULATOR
from treadle.agent_loop import Message

_TOOL = CALCULATOR.tool


def _roles(messages: tuple[Message, ...]) -> list[str]:
    return [message.role for message in messages]


def test_the_answer_with_the_tool_is_right_from_call_to_end() -> None:
    demonstration = answered_with_tool(make_question(8, 37, 48), _TOOL)
    _, user, call, result, answer = demonstration.messages
    assert user.content == "What is 37 * 48?"
    assert [(c.name, c.arguments) for c in call.tool_calls] == [
        ("calculator", {"expression": "37*48"})
    ]
    assert result.content == "1776"
    assert result.tool_call_id == call.tool_calls[0].id
    assert answer.content == "#### 1776"
    assert demonstration.tools == (_TOOL,)


def test_a_drill_has_neither_system_prompt_nor_tools() -> None:
    demonstration = drill(random.Random(0), _TOOL)
    assert _roles(demonstration.messages) == ["user", "assistant", "tool", "assistant"]
    assert demonstration.tools == ()


def test_tool_use_is_the_rollouts_prompt_and_always_calls() -> None:
    rng = random.Random(1)
    for _ in range(50):
        roles = _roles(tool_use(rng, _TOOL).messages)
        assert roles == ["system", "user", "assistant", "tool", "assistant"]


def test_the_habit_calls_as_often_as_each_wording_has_it() -> None:
    rng = random.Random(2)
    calls = [len(habit(rng, _TOOL).messages) == 5 for _ in range(4000)]
    expected = sum(template.tool_rate for template in TEMPLATES) / len(TEMPLATES)
    assert abs(sum(calls) / len(calls) - expected) < 0.03


def test_demonstrations_keep_to_training_pairs() -> None:
    held_out = {sample_question(random.Random(seed), Split.VALIDATION).text for seed in range(4000)}
    rng = random.Random(3)
    shown = {make(rng, _TOOL).messages[-4].content for make in [drill, tool_use] * 500}
    assert len(shown) > 900
    assert not shown & held_out
