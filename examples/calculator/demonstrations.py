"""Demonstrations of the warm start: answers to the question bank, with and without the tool.

Invariant: a demonstration that calls the tool is right (expression, tool result and final answer);
one that does not is a guess. So the warm-started model uses the calculator well and decides badly
when to use it, which is left for reinforcement learning to teach.

Pure functions of their random generator.
"""

import random

from calculator.questions import (
    TEMPLATES,
    Question,
    Split,
    chat_messages,
    guess_answer,
    sample_question,
)
from treadle.agent_loop import Message, ToolCall, ToolSpec
from treadle.trainer.sft import Demonstration


def _prompt(question: Question) -> tuple[Message, ...]:
    system, user = chat_messages(question)
    return (
        Message(role="system", content=system["content"]),
        Message(role="user", content=user["content"]),
    )


def call_and_answer(question: Question, tool: ToolSpec) -> tuple[Message, ...]:
    """Returns the turns of an answer with the tool: call, result, final answer."""
    call = ToolCall(id="call-0", name=tool.name, arguments={"expression": question.expression})
    return (
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content=question.answer, tool_call_id=call.id, name=tool.name),
        Message(role="assistant", content=f"#### {question.answer}"),
    )


def drill(rng: random.Random, tool: ToolSpec) -> Demonstration:
    """Returns a question with its call and answer, without system prompt and tool schema.

    Copying digits from the question into the call is the hard skill for a small model, and it is
    learned several times faster without 140 tokens of constant text around it.
    """
    question = sample_question(rng, Split.TRAIN)
    return Demonstration(messages=(*_prompt(question)[1:], *call_and_answer(question, tool)))


def tool_use(rng: random.Random, tool: ToolSpec) -> Demonstration:
    """Returns a question under the prompt of the rollout, answered with the tool."""
    return answered_with_tool(sample_question(rng, Split.TRAIN), tool)


def habit(rng: random.Random, tool: ToolSpec) -> Demonstration:
    """Returns a question under the prompt of the rollout: a call as often as its wording has it."""
    question = sample_question(rng, Split.TRAIN)
    if rng.random() < TEMPLATES[question.template].tool_rate:
        return answered_with_tool(question, tool)
    guess = Message(role="assistant", content=f"#### {guess_answer(question)}")
    return Demonstration(messages=(*_prompt(question), guess), tools=(tool,))


def answered_with_tool(question: Question, tool: ToolSpec) -> Demonstration:
    """Returns the demonstration that a rollout of full reward would be."""
    return Demonstration(
        messages=(*_prompt(question), *call_and_answer(question, tool)), tools=(tool,)
    )
