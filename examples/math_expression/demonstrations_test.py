import random
from collections import Counter

from math_expression.demonstrations import (
    PATIENCE,
    SYSTEM_PROMPT,
    computed,
    drill,
    habit,
    sample_split,
    tool_use,
)
from math_expression.expression import (
    evaluate,
    is_held_out,
    parse,
    steps,
)
from treadle.agent_loop import Message
from treadle.tools.rewards.gsm8k import score
from treadle.trainer.demo.math_expression.tool import SPEC
from treadle.trainer.sft import Demonstration


def _asked(demonstration: Demonstration) -> str:
    (user,) = (m for m in demonstration.messages if m.role == "user")
    return user.content.removeprefix("Compute ").removesuffix(".")


def _calls(demonstration: Demonstration) -> list[Message]:
    return [message for message in demonstration.messages if message.tool_calls]


def test_an_expression_is_computed_call_by_call() -> None:
    demonstration = computed(parse("3 * (4 @ 2)"), SPEC)
    system, user, first, result, second, last, answer = demonstration.messages
    assert (system.content, user.content) == (SYSTEM_PROMPT, "Compute 3 * (4 @ 2).")
    assert first.tool_calls[0].arguments == {"a": 4, "b": 2, "operand": "@"}
    assert result.content == "8"
    assert result.tool_call_id == first.tool_calls[0].id
    assert second.tool_calls[0].arguments == {"a": 3, "b": 8, "operand": "*"}
    assert second.tool_calls[0].id != first.tool_calls[0].id
    assert (last.content, answer.content) == ("24", "#### 24")
    assert demonstration.tools == (SPEC,)


def test_a_negative_value_is_an_answer_that_the_reward_reads() -> None:
    demonstration = computed(parse("1 @ 9"), SPEC)
    assert score(demonstration.messages[-1].content, "-15") == 1.0


def test_a_drill_has_neither_system_prompt_nor_tools() -> None:
    demonstration = drill(random.Random(0), SPEC)
    assert demonstration.messages[0].role == "user"
    assert demonstration.tools == ()
    assert len(_calls(demonstration)) == len(steps(parse(_asked(demonstration))))


def test_the_habit_loses_patience_and_is_then_wrong() -> None:
    rng = random.Random(2)
    called, needed = Counter[str](), Counter[str]()
    for _ in range(4000):
        demonstration = habit(rng, SPEC)
        expression = parse(_asked(demonstration))
        plan = steps(expression)
        num_calls = len(_calls(demonstration))
        right = score(demonstration.messages[-1].content, str(evaluate(expression))) == 1.0
        assert right is (num_calls == len(plan))
        called.update(step.symbol for step in plan[:num_calls])
        needed.update(step.symbol for step in plan[: num_calls + 1])
    for symbol, patience in PATIENCE.items():
        assert abs(called[symbol] / needed[symbol] - patience) < 0.08


def test_demonstrations_keep_to_the_training_split() -> None:
    rng = random.Random(3)
    for make in (drill, tool_use, habit):
        assert not any(is_held_out(parse(_asked(make(rng, SPEC)))) for _ in range(300))
    assert all(is_held_out(sample_split(rng, held_out=True)) for _ in range(100))
