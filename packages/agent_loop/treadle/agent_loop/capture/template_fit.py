"""Writes an agent's messages in a form that the chat template takes.

Invariant: nothing that an agent sends is dropped: where a template refuses a message at its place,
or leaves it out without a word, the same text is put where the template shows it. What the template
does is found by rendering short probes, once for each renderer and only where a conversation needs
it. A conversation that no form helps is refused with the template's own sentence.

Agents send what the large APIs take: several system messages, system messages between turns, user
messages in a row, and assistant turns with reasoning, a preamble and a call.

- System messages at the beginning are joined, or become the user's text if the template takes none.
- A later system message becomes the user's text.
- User messages in a row are joined.
- A preamble between reasoning and calls becomes the end of the reasoning.

Pure, except that what is found is kept.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TypeAlias
from weakref import WeakKeyDictionary

from treadle.agent_loop.errors import AgentLoopError
from treadle.agent_loop.tokens.renderer import ChatRenderer
from treadle.agent_loop.types import IMAGE_MARK, Message, Role, ToolCall, ToolSpec

_Messages: TypeAlias = tuple[Message, ...]
_JOINT = "\n\n"
_WORDS = ("alpha", "bravo", "charlie", "delta", "echo")
_TOOL = ToolSpec(name="probe", description="Answers.")
_CALL = ToolCall(id="call_0", name="probe", arguments={})
_known: WeakKeyDictionary[ChatRenderer, dict[str, bool]] = WeakKeyDictionary()


class TemplateFit:
    """What a renderer's template takes."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._takes = _known.setdefault(renderer, {})

    def opening(self, messages: Sequence[Message]) -> _Messages:
        """Returns a whole conversation as the template takes it."""
        leading = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
        first = tuple(messages[:leading])
        if len(first) > 1 and not self._shows("ssu"):
            first = (_joined(first, "system"),)
        if first and not self._shows("su"):
            first = (_joined(first, "user"),)
        return self._in_a_row((*first, *self._later(messages[leading:])))

    def following(self, messages: Sequence[Message]) -> _Messages:
        """Returns messages that follow a turn as the template takes them."""
        return self._in_a_row(self._later(messages))

    def without_preambles(self, messages: Sequence[Message]) -> _Messages:
        """Returns messages whose preambles are reasoning, if the template takes none beside it."""
        if not any(map(_has_preamble, messages)) or self._answers("preamble", self._takes_preamble):
            return tuple(messages)
        return tuple(
            replace(m, content="", reasoning=f"{m.reasoning}{_JOINT}{m.content}")
            if _has_preamble(m)
            else m
            for m in messages
        )

    def _later(self, messages: Sequence[Message]) -> _Messages:
        if not any(m.role == "system" for m in messages):
            return tuple(messages)
        if self._shows("us", "sus", "suaus", "suasu"):
            return tuple(messages)
        return tuple(replace(m, role="user") if m.role == "system" else m for m in messages)

    def _in_a_row(self, messages: _Messages) -> _Messages:
        if not any(a.role == b.role == "user" for a, b in pairwise(messages)) or self._shows("uu"):
            return messages
        return tuple(_users_joined(messages))

    def _shows(self, *roles: str) -> bool:
        """Returns whether the template shows every message of conversations with these roles.

        Args:
            roles: The first letters of the roles, a string for each conversation.
        """
        return all(self._answers(each, partial(self._probe, each)) for each in roles)

    def _answers(self, question: str, ask: Callable[[], bool]) -> bool:
        if question not in self._takes:
            self._takes[question] = ask()
        return self._takes[question]

    def _probe(self, roles: str) -> bool:
        names: dict[str, Role] = {"s": "system", "u": "user", "a": "assistant"}
        words = _WORDS[: len(roles)]
        chat = [
            Message(role=names[role], content=word) for role, word in zip(roles, words, strict=True)
        ]
        for tools in ((), (_TOOL,)):  # some templates refuse a chat without tools
            try:
                text = self._renderer.decode(self._renderer.render(chat, tools=tools).ids)
            except AgentLoopError:
                continue
            return all(word in text for word in words)
        return False

    def _takes_preamble(self) -> bool:
        turn = Message(role="assistant", content="bravo", reasoning="charlie", tool_calls=(_CALL,))
        result = Message(role="tool", content="delta", tool_call_id=_CALL.id, name=_CALL.name)
        chat = (Message(role="user", content="alpha"), turn, result)
        try:
            self._renderer.render(chat, tools=(_TOOL,))
        except AgentLoopError:
            return False
        return True


def _has_preamble(message: Message) -> bool:
    return bool(message.tool_calls and message.reasoning and message.content)


def _users_joined(messages: _Messages) -> Iterator[Message]:
    row: list[Message] = []
    for message in messages:
        if row and message.role != "user":
            yield _joined(row, "user")
            row.clear()
        if message.role == "user":
            row.append(message)
        else:
            yield message
    if row:
        yield _joined(row, "user")


def _joined(messages: Sequence[Message], role: Role) -> Message:
    """Returns one message with the texts and the images of several, in their order."""
    if len(messages) == 1:
        return replace(messages[0], role=role)
    texts = ("".join(p if isinstance(p, str) else IMAGE_MARK for p in m.parts) for m in messages)
    return Message(
        role=role,
        content=_JOINT.join(texts),
        images=tuple(image for message in messages for image in message.images),
    )
