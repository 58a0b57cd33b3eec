"""The conversations that every template is tried with."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from treadle.agent_loop import Message, ToolCall, ToolSpec

TOOLS = (
    ToolSpec(
        name="calculator",
        description="Evaluates an expression.",
        parameters={
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "To evaluate."}},
            "required": ["expression"],
        },
    ),
    ToolSpec(
        name="search",
        description="Searches.",
        parameters={
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "Words."},
                "limit": {"type": "integer", "description": "Most results."},
            },
            "required": ["query"],
        },
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation that ends with a turn of the model.

    Attributes:
        name: Of the table's column.
        messages: Assistant turns are what the model writes.
        tools: Whether the tools are shown.
    """

    name: str
    messages: tuple[Message, ...]
    tools: bool = False


REASONING = "Let me see."
SYSTEM = Message(role="system", content="Be brief.")


def user(text: str) -> Message:
    """A user's message."""
    return Message(role="user", content=text)


def says(text: str, *calls: ToolCall) -> Message:
    """A turn of the model."""
    return Message(role="assistant", content=text, tool_calls=calls)


def call(number: int, expression: str = "2*3") -> ToolCall:
    """A call; its id suits every family."""
    return ToolCall(
        id=f"callid{number:03}", name="calculator", arguments={"expression": expression}
    )


def result(number: int, text: str) -> Message:
    """The answer to `call(number)`."""
    return Message(role="tool", content=text, tool_call_id=f"callid{number:03}", name="calculator")


# Not in Unicode's composed form, and with characters outside of the first plane.
ODD = "Cafe\u0301 n\u0303, \u212b, \ufb01, \u1100\u1161, \U0001f469\u200d\U0001f52c, \u00a0 \t x"

CONVERSATIONS = (
    Conversation(
        name="chat",
        messages=(
            SYSTEM,
            user("Hi"),
            says("Hello."),
            user("Two times three?"),
            says("Six."),
            user("Thanks"),
            says("!"),
        ),
    ),
    Conversation(
        name="tool",
        messages=(
            SYSTEM,
            user("Two times three?"),
            says("", call(0)),
            result(0, "result 6"),
            says("It is 6."),
        ),
        tools=True,
    ),
    Conversation(
        name="rounds",
        messages=(
            SYSTEM,
            user("Two times three?"),
            says("I compute.", call(0)),
            result(0, "result 6"),
            says("Again.", call(1, "6*6")),
            result(1, "result 36"),
            says("It is 36."),
            user("And one and one?"),
            says("", call(2, "1+1")),
            result(2, "result 2"),
            says("Two."),
        ),
        tools=True,
    ),
    Conversation(
        name="parallel",
        messages=(
            SYSTEM,
            user("Two times three, four times five?"),
            says("", call(0), call(1, "4*5")),
            result(0, "result 6"),
            result(1, "result 20"),
            says("6, 20"),
        ),
        tools=True,
    ),
    Conversation(
        name="unicode",
        messages=(
            SYSTEM,
            user(ODD),
            says(f"{ODD} yes"),
            user(f"{ODD} \n{ODD}"),
            says("\u4f60\u597d"),
        ),
    ),
    Conversation(
        name="odd tool text",
        messages=(
            SYSTEM,
            user("Two times three?"),
            says("", call(0)),
            result(0, f'{ODD}\n<|im_end|> [INST] </s> "quoted" {{braces}}'),
            says("Six."),
        ),
        tools=True,
    ),
)


def reduced(conversation: Conversation) -> Iterator[Conversation]:
    """The conversation, then with less: no system message, or tools where there were none."""
    yield conversation
    without = replace(conversation, messages=conversation.messages[1:])
    yield without
    if not conversation.tools:
        yield replace(conversation, tools=True)


def thinking(conversation: Conversation) -> Conversation:
    """The same, where the model thinks before each turn."""
    messages = tuple(
        replace(m, reasoning=REASONING) if m.role == "assistant" else m
        for m in conversation.messages
    )
    return replace(conversation, name=f"{conversation.name}+r", messages=messages)
