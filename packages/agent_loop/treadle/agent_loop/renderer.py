"""The renderer: messages to ids, and ids to messages, without touching what was sampled.

Invariants:

1. `render(messages) + sampled ids + extend(...)` equals, token for token, what the template
   gives for the whole conversation, whenever the sampled ids are those the template would write.
2. `extend` never re-tokenises: it looks at the ids so far only to see whether the turn was
   closed by the template's end-of-turn id, and returns what has to follow.
3. `parse` never raises on any ids.

Renderers are shared by all trajectories of a process and called on the event loop: they hold no
state of a trajectory and wait for nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from treadle.agent_loop.types import Message, ToolCall, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """Text that was meant as a tool call and is not one.

    Attributes:
        text: The whole span, with its marks.
        start: First character in the decoded completion.
        stop: After the last one.
        reason: What is wrong with it; shown to the model.
        name: The tool it names, where that can be told.
    """

    text: str
    start: int
    stop: int
    reason: str
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCompletion:
    """A completion read as a message.

    Attributes:
        message: The assistant's message; `content` is the text without the calls, as sampled.
        call_starts: Place of each of `message.tool_calls` in the text, as `MalformedCall.start`.
        malformed: What looked like a call and is none.
    """

    message: Message
    call_starts: tuple[int, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()

    @property
    def requests(self) -> tuple[ToolCall | MalformedCall, ...]:
        """Calls and malformed calls, in the order in which the model wrote them."""
        calls = zip(self.call_starts, self.message.tool_calls, strict=True)
        found: list[tuple[int, ToolCall | MalformedCall]] = list(calls)
        found.extend((bad.start, bad) for bad in self.malformed)
        return tuple(request for _, request in sorted(found, key=lambda pair: pair[0]))


class ChatRenderer(Protocol):
    """One model family's chat format."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant's turn; loops add them to the sampling parameters."""
        ...

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec]) -> tuple[int, ...]:
        """Returns the ids of a conversation, ready for the assistant's next turn.

        Raises:
            RenderError: The template refuses these messages.
        """
        ...

    def extend(
        self, ids: Sequence[int], messages: Sequence[Message], *, tools: Sequence[ToolSpec]
    ) -> tuple[int, ...]:
        """Returns the ids that follow a sampled turn: its end, the messages, the next header.

        Args:
            ids: All ids so far, ending with a sampled turn. If the turn's last id is not the
                template's end-of-turn id (it was cut, or stopped by another id), the result
                begins with that id, so that the boundary is the one that the template writes.
            messages: Tool or user messages that answer the turn; rendered as one group.
            tools: The tools of the conversation.

        Raises:
            RenderError: The template cannot be extended exactly, or refuses these messages.
        """
        ...

    def parse(self, token_ids: Sequence[int]) -> ParsedCompletion:
        """Reads the ids of one completion. Never raises."""
        ...
