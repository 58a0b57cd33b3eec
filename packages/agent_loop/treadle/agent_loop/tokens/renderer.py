"""The renderer interface: messages to ids, and ids to messages, without changing sampled ids.

Invariants:

1. `render(messages) + sampled ids + extend(...)` equals, token for token, the template's output
   for the whole conversation, if the sampled ids are those that the template would write.
2. `extend` never retokenises. It looks at the ids so far only to find how the turn ends and what it
   left open, and returns what must follow.
3. `parse` never raises on any ids.

All trajectories of a process share a renderer and call it on the event loop, so it has no state
per trajectory and waits for nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from treadle.agent_loop.types import Image, Message, ToolCall, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImage:
    """An image and the position of its placeholder ids.

    Attributes:
        start: Position of its first placeholder id.
        num_tokens: Number of its placeholder ids, as the model's processor determines it.

    Raises:
        ValueError: The position is negative, or there is no placeholder.
    """

    image: Image
    start: int
    num_tokens: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.num_tokens < 1:
            raise ValueError(
                f"an image has {self.num_tokens} ids at position {self.start}; it must have at "
                "least 1 id, at 0 or later"
            )

    @property
    def stop(self) -> int:
        """Position after the last placeholder id."""
        return self.start + self.num_tokens

    def shifted(self, by: int) -> "PlacedImage":
        """Returns the same image, `by` ids later."""
        return PlacedImage(image=self.image, start=self.start + by, num_tokens=self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """Text and images as ids.

    Attributes:
        ids: [R], including the placeholder ids of the images.
        images: In the order of their positions, which do not overlap and lie within the ids.

    Raises:
        ValueError: Images overlap, or reach past the end.
    """

    ids: tuple[int, ...]
    images: tuple[PlacedImage, ...] = ()

    def __post_init__(self) -> None:
        end = 0
        for placed in self.images:
            if not end <= placed.start < placed.stop <= len(self.ids):
                raise ValueError(
                    f"an image is at [{placed.start}, {placed.stop}); it must lie in "
                    f"[{end}, {len(self.ids)}), after the image before it"
                )
            end = placed.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """Text that was meant as a tool call and cannot be parsed as one.

    Attributes:
        text: The whole span, including its marks.
        start: Position of its first character in the decoded completion.
        stop: Position after its last character.
        reason: The problem of the call; shown to the model.
        id: Identifies it in the answer, like `ToolCall.id`; unique in the turn with those.
        name: The tool that it names, if that can be determined.
    """

    text: str
    start: int
    stop: int
    reason: str
    id: str
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCompletion:
    """A completion parsed as a message.

    Attributes:
        message: The assistant's message; `content` is the text without the calls, as sampled.
        call_starts: Position of each of `message.tool_calls`, like `MalformedCall.start`.
        malformed: Spans that look like a call and cannot be parsed.
        content_start: Position after the reasoning and its marks.
    """

    message: Message
    call_starts: tuple[int, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()
    content_start: int = 0

    @property
    def requests(self) -> tuple[ToolCall | MalformedCall, ...]:
        """Calls and malformed calls, in the order in which the model wrote them."""
        calls = zip(self.call_starts, self.message.tool_calls, strict=True)
        found: list[tuple[int, ToolCall | MalformedCall]] = list(calls)
        found.extend((bad.start, bad) for bad in self.malformed)
        return tuple(request for _, request in sorted(found, key=lambda pair: pair[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFrame:
    """How a format writes a call of one tool whose arguments are JSON.

    Attributes:
        trigger: The beginning of every call, of any tool; no other text has it.
        begin: Text before the arguments; begins with the trigger.
    """

    trigger: str
    begin: str
    end: str


class ChatRenderer(Protocol):
    """The chat format of one model family."""

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

        Positions of images count from the first id of the result.

        Args:
            ids: All ids so far, ending with a sampled turn. If the turn's last id is not the
                template's end-of-turn id (the turn was cut, or another id stopped it), the result
                begins with what closes the reasoning and other elements that the turn left open,
                and the end-of-turn id, so that the boundary is the template's.
            messages: Tool or user messages that answer the turn; rendered as one group.
            tools: The tools of the conversation.
            history: The messages that `ids` represent, including the sampled turn. Some templates
                look there for a system message or count earlier results. May be empty.

        Raises:
            RenderError: The template cannot be extended exactly, or refuses these messages.
        """
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the ids of plain text, without chat marks around it.

        Raises:
            RenderError: The tokenizer refuses the text.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of ids, including special tokens. Never raises on known ids."""
        ...

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[ToolSpec] = (),
        prompt: Sequence[int] = (),
    ) -> ParsedCompletion:
        """Parses the ids of one completion. Never raises.

        Args:
            token_ids: The sampled ids, including the id that ended the turn.
            tools: The tools of the conversation. Some formats write all arguments as plain text;
                only the tool's schema distinguishes numbers from strings.
            prompt: The ids that the completion continues. Their end shows whether the template
                has opened the model's reasoning.
        """
        ...


@runtime_checkable
class BoundedRenderer(ChatRenderer, Protocol):
    """A renderer that can refuse a long text before it encodes all of it.

    Encoding takes hundreds of bytes per token, and seconds for some megabytes of text.
    """

    def bounded(self, max_tokens: int) -> ChatRenderer:
        """Returns this renderer with a bound.

        `render` and `extend` of the result raise `PromptTooLongError` for a text that is clearly
        longer than `max_tokens`, with work that does not grow with the text. The caller checks the
        exact number of ids.
        """
        ...


class RerenderingRenderer(ChatRenderer, Protocol):
    """A renderer that renders a conversation again with less work than the first time.

    The ids of a conversation are known when it ends, except where the template would now write it
    differently, and where the model wrote.
    """

    def render_again(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec],
        ids: Sequence[int],
        written: Sequence[tuple[int, int]],
    ) -> Rendering:
        """Returns what `render` returns.

        Args:
            ids: The ids of the conversation so far.
            written: The parts [start, stop) of `ids` that are the result of one call of `render` or
                `extend` each.

        Raises:
            RenderError: The template refuses these messages.
        """
        ...


@runtime_checkable
class FinishingRenderer(ChatRenderer, Protocol):
    """A renderer for conversations that end with an assistant's turn, as training has them.

    Some templates write that turn, its reasoning or its end only if no further turn is opened.
    """

    def render_finished(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSpec]
    ) -> tuple[int, ...]:
        """Returns the ids of a conversation, without the header of a further turn.

        Raises:
            RenderError: The template refuses these messages.
        """
        ...


@runtime_checkable
class StreamingRenderer(ChatRenderer, Protocol):
    """A renderer that can return the settled part of a completion while it is being sampled."""

    def settled(self, text: str, *, prompt: Sequence[int]) -> tuple[str, str]:
        """Returns the beginnings of the reasoning and the content that no continuation can change.

        `parse` of the whole completion returns texts that begin with them, except that it drops
        white space before the content if calls follow. Never raises.

        Args:
            text: The beginning of the decoded completion.
        """
        ...


@runtime_checkable
class FramingRenderer(ChatRenderer, Protocol):
    """A renderer that can return the frame of a call, so servers can enforce its arguments."""

    def call_frame(self, name: str) -> CallFrame | None:
        """Returns how a call of a tool is written; None if its arguments are not one JSON text."""
        ...
