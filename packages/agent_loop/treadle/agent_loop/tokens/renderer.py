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

from treadle.agent_loop.types import Image, Message, ToolCall, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImage:
    """An image and the ids that stand for it.

    Attributes:
        image: The image.
        start: Place of its first placeholder id.
        num_tokens: Placeholder ids, as many as the model's processor makes of this image.

    Raises:
        ValueError: The place is negative or empty.
    """

    image: Image
    start: int
    num_tokens: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.num_tokens < 1:
            raise ValueError(
                f"an image takes {self.num_tokens} ids at {self.start}; at least 1 at 0 or later"
            )

    @property
    def stop(self) -> int:
        """After its last placeholder id."""
        return self.start + self.num_tokens

    def shifted(self, by: int) -> "PlacedImage":
        """The same image, `by` ids further on."""
        return PlacedImage(image=self.image, start=self.start + by, num_tokens=self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """Text and images as ids.

    Attributes:
        ids: [R], the placeholder ids of the images included.
        images: In the order of their places, which do not overlap and lie within the ids.

    Raises:
        ValueError: The places of the images overlap, or reach past the end.
    """

    ids: tuple[int, ...]
    images: tuple[PlacedImage, ...] = ()

    def __post_init__(self) -> None:
        end = 0
        for placed in self.images:
            if not end <= placed.start < placed.stop <= len(self.ids):
                raise ValueError(
                    f"an image at [{placed.start}, {placed.stop}) of {len(self.ids)} ids; the one "
                    f"before it ends at {end}"
                )
            end = placed.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """Text that was meant as a tool call and is not one.

    Attributes:
        text: The whole span, with its marks.
        start: First character in the decoded completion.
        stop: After the last one.
        reason: What is wrong with it; shown to the model.
        id: What it is answered under, as `ToolCall.id`; unique in the turn with those.
        name: The tool it names, where that can be told.
    """

    text: str
    start: int
    stop: int
    reason: str
    id: str
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

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec]) -> Rendering:
        """Returns the ids of a conversation, ready for the assistant's next turn.

        Raises:
            RenderError: The template refuses these messages.
        """
        ...

    def extend(
        self,
        ids: Sequence[int],
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec],
        history: Sequence[Message] = (),
    ) -> Rendering:
        """Returns what follows a sampled turn: its end, the messages, the next header.

        The places of its images count from its own first id.

        Args:
            ids: All ids so far, ending with a sampled turn. If the turn's last id is not the
                template's end-of-turn id (it was cut, or stopped by another id), the result
                begins with that id, so that the boundary is the one that the template writes.
            messages: Tool or user messages that answer the turn; rendered as one group.
            tools: The tools of the conversation.
            history: The messages that `ids` say, the sampled turn included. Some templates look
                there for a system message or count earlier results. Empty: there are none.

        Raises:
            RenderError: The template cannot be extended exactly, or refuses these messages.
        """
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the ids of plain text, without a mark of a chat around it.

        Raises:
            RenderError: The tokenizer refuses the text.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of ids, special tokens included. Never raises on ids it knows."""
        ...

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[ToolSpec] = (),
        prompt: Sequence[int] = (),
    ) -> ParsedCompletion:
        """Reads the ids of one completion. Never raises.

        Args:
            token_ids: That were sampled, the id that ended the turn included.
            tools: The tools of the conversation. Some formats write arguments as plain text, which
                only a tool's schema tells from numbers.
            prompt: The ids that the completion continues. Its end says whether the template has
                opened the model's reasoning.
        """
        ...
