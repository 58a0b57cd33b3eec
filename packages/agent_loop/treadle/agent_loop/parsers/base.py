"""The parser protocol: text to calls, and calls to text.

Invariant: `parse` is a pure function that accepts any text. What looks like a call and is none is
returned as a span with a reason, never dropped and never raised.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from treadle.agent_loop.renderer import MalformedCall
from treadle.agent_loop.types import ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedText:
    """A text read.

    Attributes:
        content: The text when it holds no call; else what is around the calls, stripped.
            Malformed calls stay in it.
        calls: In order; ids are unique in this text.
        call_starts: Place of each call's first character in the text.
        malformed: In order.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    call_starts: tuple[int, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()


class ToolCallParser(Protocol):
    """One family's way of writing calls."""

    def parse(self, text: str) -> ParsedText:
        """Reads a decoded completion. Never raises."""
        ...

    def render(self, content: str, calls: Sequence[ToolCall]) -> str:
        """Writes what `parse` reads: `parse(render(content, calls))` gives both back."""
        ...
