"""The parser protocol: text to calls, and calls to text.

Invariant: `parse` is a pure function that accepts any text. A malformed call is returned as a span
with a reason; it is never dropped and never raises. The time is linear in the length of the text,
even if a model repeats a mark endlessly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from treadle.agent_loop.tokens.renderer import CallFrame, MalformedCall
from treadle.agent_loop.types import ToolCall, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedText:
    """The result of parsing a text.

    Attributes:
        content: The text after the reasoning if it has no call; else the text around the calls,
            stripped. Malformed calls stay in it.
        calls: In order; ids are unique in this text, including those of `malformed`.
        call_starts: Position of each call's first character in the text.
        malformed: In the order of execution.
        reasoning: The model's reasoning, without its marks. None means that the parser does not
            separate reasoning and leaves it in `content`; "" that there was none.
        content_start: Position after the reasoning and its marks.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    call_starts: tuple[int, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()
    reasoning: str | None = None
    content_start: int = 0


@dataclass(frozen=True, slots=True)
class Settled:
    """The part of a text that is certain before its end has come.

    Attributes:
        reasoning: The beginning of what is `ParsedText.reasoning`.
        content: The beginning of `ParsedText.content`, except that the white space before it is
            dropped if calls follow.
    """

    reasoning: str = ""
    content: str = ""


def without_partial(text: str, *marks: str) -> str:
    """Returns a text without a beginning of one of the marks at its end."""
    for size in range(min(len(text), max(map(len, marks), default=1) - 1), 0, -1):
        end = text[-size:]
        if any(mark.startswith(end) for mark in marks):
            return text[:-size]
    return text


class ToolCallParser(Protocol):
    """The format in which a model family writes reasoning and calls."""

    @property
    def stop_tokens(self) -> tuple[str, ...]:
        """Special tokens that end a turn, in addition to the template's end-of-turn token."""
        ...

    def parse(
        self, text: str, *, tools: Sequence[ToolSpec] = (), prompt_end: str = ""
    ) -> ParsedText:
        """Parses a decoded completion. Never raises.

        Args:
            text: The text with its special tokens, except those that ended the turn.
            tools: Their schemas give the types of arguments that the format writes as plain text.
            prompt_end: The end of the prompt, which may have opened the reasoning. "" means
                unknown; then reasoning that is only closed counts as opened in the prompt.
        """
        ...

    def render(self, content: str, calls: Sequence[ToolCall], *, reasoning: str = "") -> str:
        """Writes a turn so that `parse(render(content, calls))` returns content and calls.

        Raises:
            ValueError: The format cannot express it: a mark inside a name or a plain text, or
                reasoning that the parser does not separate.
        """
        ...


@runtime_checkable
class StreamingParser(ToolCallParser, Protocol):
    """A parser that can return the settled part of a completion while it is being sampled."""

    def settled(self, text: str, *, prompt_end: str) -> Settled:
        """Returns what no continuation of a text can change. Never raises or retracts anything.

        Args:
            text: The beginning of a decoded completion.
            prompt_end: See `ToolCallParser.parse`; "" settles no reasoning.
        """
        ...


@runtime_checkable
class ClosingParser(ToolCallParser, Protocol):
    """A parser that finds what a turn has left open, so that it can be closed."""

    def unclosed(self, text: str) -> tuple[str, ...]:
        """Returns the marks that close what is open at the end of a text, innermost first.

        Args:
            text: The header of a turn, as far as it is known, and what was sampled of the turn.
        """
        ...


@runtime_checkable
class FramingParser(ToolCallParser, Protocol):
    """A parser that can return the frame of a call, so servers can enforce its arguments."""

    def call_frame(self, name: str) -> CallFrame | None:
        """Returns how a call of a tool is written; None if its arguments are not one JSON text."""
        ...
