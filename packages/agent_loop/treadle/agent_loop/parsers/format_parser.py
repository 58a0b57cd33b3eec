"""A parser built from a format of reasoning and a format of calls.

Invariant: a format only looks for calls. Reasoning, content, ids and order are handled here, in the
same way for all formats.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from treadle.agent_loop.parsers.base import ParsedText, Settled, without_partial
from treadle.agent_loop.parsers.scan import ReasoningBlock, Scan, Thoughts
from treadle.agent_loop.parsers.schema_values import Schemas
from treadle.agent_loop.parsers.thinking import Thinking, UnclosedReasoning
from treadle.agent_loop.tokens.renderer import CallFrame
from treadle.agent_loop.types import ToolCall, ToolSpec


class CallFormat(Protocol):
    """The format of a family's calls."""

    stop_tokens: tuple[str, ...]
    """As `ToolCallParser.stop_tokens`."""
    gap: str
    """The text between the content and the first call."""
    element: tuple[str, str] | None
    """A pattern of the marks that open an element, and the template of the mark that closes what
    such a match opens (as in `re.Match.expand`). None if nothing is closed."""

    def new_id(self, number: int, name: str) -> str:
        """Returns the id of a call without one."""
        ...

    def read(self, scan: Scan, schemas: Schemas) -> None:
        """Reports every call and every malformed call after `scan.position`."""
        ...

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Writes the calls; at least one.

        Raises:
            ValueError: The format cannot express one of them.
        """
        ...


@runtime_checkable
class MarkedFormat(CallFormat, Protocol):
    """A format that lists how its calls may begin, so that the text before can be streamed."""

    marks: tuple[str, ...]
    """The beginnings of a call, or of a mark around calls or content; at least one."""
    leads: tuple[str, ...]
    """The beginnings of a call that count only at the beginning of the content."""


@runtime_checkable
class FramedFormat(CallFormat, Protocol):
    """A format whose calls have their arguments as one JSON text."""

    def frame(self, name: str) -> CallFrame:
        """Returns how a call of a tool is written."""
        ...


class FormatParser:
    """A `ToolCallParser` for one format of calls, with or without reasoning before them.

    Args:
        thinking: The marks of reasoning. None means that there is no reasoning.
        separates: Whether reasoning is set apart; else it stays in the content.
        frame: Text before and after the content. The format of calls reports it.
        unclosed: The meaning of a call behind reasoning that was never closed.

    Attributes:
        thinking: The marks of reasoning, None if there is none.
    """

    def __init__(
        self,
        calls: CallFormat,
        *,
        thinking: Thinking | None = None,
        separates: bool = True,
        frame: tuple[str, str] = ("", ""),
        unclosed: UnclosedReasoning = UnclosedReasoning.CALL,
    ) -> None:
        self._format = calls
        self.thinking = thinking
        self._separates = separates and thinking is not None
        self._frame = frame
        self._unclosed = UnclosedReasoning(unclosed)
        self._marks = calls.marks if isinstance(calls, MarkedFormat) else ()

    @property
    def stop_tokens(self) -> tuple[str, ...]:
        """As in `ToolCallParser`."""
        return self._format.stop_tokens

    @property
    def reads_prompt_end(self) -> bool:
        """Whether `parse` looks at the end of the prompt, where reasoning may be opened."""
        return self.thinking is not None

    def parse(
        self, text: str, *, tools: Sequence[ToolSpec] = (), prompt_end: str = ""
    ) -> ParsedText:
        """As in `ToolCallParser`."""
        read, new_id, schemas = self._format.read, self._format.new_id, Schemas(tools)
        if self.thinking is None:
            scan = Scan(text, start=0, new_id=new_id)
            read(scan, schemas)
            return scan.parsed(reasoning=None)

        def unclosed(begin: int) -> int:
            ahead = Scan(text, start=begin, new_id=new_id)
            read(ahead, schemas)
            return ahead.last_calls()

        reasoning, start, closed = self.thinking.split(
            text, prompt_end=prompt_end, unclosed=unclosed
        )
        thoughts = Thoughts(
            thinking=self.thinking,
            marks=self._marks,
            unclosed=unclosed,
            rule=self._unclosed,
            first=ReasoningBlock(start=0, stop=start, closed=closed),
        )
        scan = Scan(text, start=start, new_id=new_id, thoughts=thoughts)
        read(scan, schemas)
        if self._separates:
            return scan.parsed(reasoning=reasoning)
        return scan.parsed(reasoning=None, content_start=0)

    def settled(self, text: str, *, prompt_end: str) -> Settled:
        """As in `StreamingParser`: the content up to the first mark, without white space after it.

        What follows a mark is settled by the end only: whether it is a call, and what of it is
        content, depends on all of it.
        """
        reasoning, start = "", 0
        if self.thinking is not None:
            reasoning, stop = self.thinking.settled(text, prompt_end=prompt_end, marks=self._marks)
            if stop is None and self._separates:
                return Settled(reasoning)
            start = stop or 0
        if not isinstance(self._format, MarkedFormat):
            return Settled(reasoning)
        if text[start:].lstrip().startswith(self._format.leads):
            return Settled(reasoning)
        if not self._separates:
            reasoning, start = "", 0
        marks = self._format.marks
        found = [at for mark in marks if (at := text.find(mark, start)) >= 0]
        before = text[start : min(found)] if found else without_partial(text[start:], *marks)
        return Settled(reasoning, before.rstrip())

    def unclosed(self, text: str) -> tuple[str, ...]:
        """As in `ClosingParser`; within reasoning nothing else is an element."""
        thinking = self.thinking
        elements = [] if self._format.element is None else [self._format.element]
        if thinking is None:
            return open_elements(text, elements)
        elements.append((re.escape(thinking.open), thinking.close))
        marks = open_elements(text, elements)
        return marks[marks.index(thinking.close) :] if thinking.close in marks else marks

    def call_frame(self, name: str) -> CallFrame | None:
        """As in `FramingParser`."""
        return self._format.frame(name) if isinstance(self._format, FramedFormat) else None

    def render(self, content: str, calls: Sequence[ToolCall], *, reasoning: str = "") -> str:
        """As in `ToolCallParser`."""
        thought = ""
        if reasoning:
            if self.thinking is None or not self._separates:
                raise ValueError("this parser does not separate reasoning: put it in the content")
            thought = self.thinking.write(reasoning)
        if content:
            content = (
                self._frame[0] + writable(content, *filter(None, self._frame)) + self._frame[1]
            )
        if not calls:
            return thought + content
        return thought + content + (self._format.gap if content else "") + self._format.write(calls)


def open_elements(text: str, elements: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Returns the marks that close the elements open at the end of a text, innermost first."""
    opened = {
        found.start(): found.expand(close)
        for pattern, close in elements
        for found in re.finditer(pattern, text)
    }
    marks = "|".join(map(re.escape, set(opened.values()))) or r"(?!)"
    closed = {found.start(): found[0] for found in re.finditer(marks, text)}
    stack: list[str] = []
    for place in sorted({*opened, *closed}):
        mark = opened.get(place) or closed[place]
        # What is inside ends with it; what is opened again was a mention.
        if mark in stack:
            del stack[stack.index(mark) :]
        if place in opened:
            stack.append(mark)
    return tuple(reversed(stack))


def counted_id(number: int, name: str) -> str:
    """Returns the id of a call in a format without ids."""
    return f"call_{number}"


def writable(text: str, *marks: str) -> str:
    """Returns the text.

    Raises:
        ValueError: The text contains one of the marks that would end it.
    """
    for mark in marks:
        if mark in text:
            raise ValueError(f"the format cannot write {text!r:.80}, which holds {mark!r}")
    return text
