"""Demonstrations of the warm start: expressions computed with the tool, and guesses.

Invariant: every call is right (the next operator, its numbers, the tool's result), and every answer
before the last call is wrong. So the warm-started model can compute any expression and too often
stops early, which is left for reinforcement learning to teach.

Pure functions of their random generator.
"""

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from math_expression.expression import (
    Expression,
    evaluate,
    is_held_out,
    sample,
    steps,
)
from treadle.agent_loop import Message, ToolCall, ToolSpec
from treadle.trainer.sft import Demonstration

__all__ = [
    "NUM_OPERATORS",
    "OPERANDS",
    "PATIENCE",
    "SYSTEM_PROMPT",
    "computed",
    "drill",
    "habit",
    "prompt",
    "sample_split",
    "tool_use",
]

SYSTEM_PROMPT: Final = "The tool alone knows the operator @. End with #### <answer>."
"""Tells the model the answer format that the strict GSM8K reward reads."""

OPERANDS: Final = (1, 9)
"""Smallest and largest number in an expression of the demo."""

NUM_OPERATORS: Final = (1, 2)
"""Fewest and most operators in an expression of the demo."""

PATIENCE: Final[Mapping[str, float]] = MappingProxyType({"+": 0.85, "*": 0.85, "-": 0.4, "@": 0.4})
"""Probability that a demonstration of the habit makes a call, by its operator."""


def prompt(expression: Expression) -> tuple[Message, ...]:
    """Returns the task: system and user message."""
    return (
        Message(role="system", content=SYSTEM_PROMPT),
        Message(role="user", content=f"Compute {expression}."),
    )


def sample_split(
    rng: random.Random,
    *,
    held_out: bool,
    num_operators: tuple[int, int] = NUM_OPERATORS,
    operands: tuple[int, int] = OPERANDS,
) -> Expression:
    """Draws an expression of one split.

    A number of operators is drawn the more often the larger it is: there is more to learn in it.
    """
    numbers = range(num_operators[0], num_operators[1] + 1)
    while True:
        (number,) = rng.choices(numbers, weights=numbers)
        expression = sample(rng, num_operators=number, operands=operands)
        if is_held_out(expression) is held_out:
            return expression


def _turns(expression: Expression, num_calls: int, tool: ToolSpec) -> tuple[Message, ...]:
    """Returns the first calls, their results and the answer: the value or the next call's `a`."""
    plan = steps(expression)
    turns: list[Message] = []
    for index, step in enumerate(plan[:num_calls]):
        call = ToolCall(
            id=f"call-{index}",
            name=tool.name,
            arguments={"a": step.a, "b": step.b, "operand": step.symbol},
        )
        turns.append(Message(role="assistant", content="", tool_calls=(call,)))
        turns.append(
            Message(role="tool", content=str(step.value), tool_call_id=call.id, name=tool.name)
        )
    answer = plan[num_calls].a if num_calls < len(plan) else evaluate(expression)
    return (*turns, Message(role="assistant", content=f"#### {answer}"))


def computed(expression: Expression, tool: ToolSpec) -> Demonstration:
    """Returns the demonstration that a rollout of full reward would be: one call per operator."""
    turns = _turns(expression, len(steps(expression)), tool)
    return Demonstration(messages=(*prompt(expression), *turns), tools=(tool,))


def drill(rng: random.Random, tool: ToolSpec) -> Demonstration:
    """Returns an expression with its calls and answer, without system prompt and tool schema.

    Copying numbers into calls, and results into further calls, is the hard skill for a small
    model, and it is learned several times faster without the constant text around it.
    """
    demonstration = computed(sample_split(rng, held_out=False), tool)
    return Demonstration(messages=demonstration.messages[1:])


def tool_use(rng: random.Random, tool: ToolSpec) -> Demonstration:
    """Returns an expression under the prompt of the rollout, computed to its end."""
    return computed(sample_split(rng, held_out=False), tool)


def habit(rng: random.Random, tool: ToolSpec) -> Demonstration:
    """Returns the same, but patience may end before a call, more often before some (`PATIENCE`).

    Then the first number of the call that is not made is given as the answer: a copy, which costs
    the model nothing to predict. Where that happens to be right, the call is made.
    """
    expression = sample_split(rng, held_out=False)
    plan = steps(expression)
    num_calls = 0
    while num_calls < len(plan):
        step = plan[num_calls]
        if rng.random() >= PATIENCE[step.symbol] and step.a != evaluate(expression):
            break
        num_calls += 1
    messages = (*prompt(expression), *_turns(expression, num_calls, tool))
    return Demonstration(messages=messages, tools=(tool,))
