"""The parser protocol: text to calls, and calls to text.

Invariant: `parse` is a pure function that accepts any text. What looks like a call and is none is
returned as a span with a reason, never dropped and never raised. It takes time linear in the text,
also on the text of a model that repeats a mark for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from treadle.agent_loop.tokens.renderer import MalformedCall
from treadle.agent_loop.types import ToolCall, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedText:
    """A text read.

    Attributes:
        content: The text after the reasoning when it holds no call; else what is around the
            calls, stripped. Malformed calls stay in it.
        calls: In order; ids are unique in this text, those of `malformed` included.
        call_starts: Place of each call's first character in the text.
        malformed: In order.
        reasoning: What the model thought before it answered, without its marks. None: the parser
            knows no reasoning, and leaves it in `content`. "": there was none.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    call_starts: tuple[int, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()
    reasoning: str | None = None


class ToolCallParser(Protocol):
    """One family's way of writing reasoning and calls."""

    @property
    def stop_tokens(self) -> tuple[str, ...]:
        """Special tokens that end a turn besides the one that the template ends it with."""
        ...

    def parse(
        self, text: str, *, tools: Sequence[ToolSpec] = (), prompt_end: str = ""
    ) -> ParsedText:
        """Reads a decoded completion. Never raises.

        Args:
            text: With its special tokens, but for those that ended the turn.
            tools: Whose schemas say what an argument is, where the format writes plain text.
            prompt_end: The end of what the model continues, which may have opened its reasoning.
                "": not known; then a reasoning that is closed was opened there.
        """
        ...

    def render(self, content: str, calls: Sequence[ToolCall], *, reasoning: str = "") -> str:
        """Writes what `parse` reads: `parse(render(content, calls))` gives both back.

        Raises:
            ValueError: The format cannot say this: a mark inside a name or a plain text, or
                reasoning where the parser knows none.
        """
        ...
