"""The scan of one text: finds marks, and collects the spans that a format reports.

Invariants: spans are reported from left to right and do not overlap; text outside of them is
content. A mark inside reasoning begins no call: `find` passes over it. Searches for a mark from
increasing positions cost one pass over the text in total, so a parser that fails at each of a
thousand opening marks is still linear.
"""

import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from treadle.agent_loop.parsers.base import ParsedText
from treadle.agent_loop.parsers.thinking import Thinking, UnclosedReasoning
from treadle.agent_loop.tokens.renderer import MalformedCall
from treadle.agent_loop.types import ToolCall

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningBlock:
    """A reasoning in the text, with its marks.

    Attributes:
        start: Position of its first character.
        closed: Whether it has its closing mark; else it ends where the last calls begin.
    """

    start: int
    stop: int
    closed: bool


_NO_BLOCK: Final = ReasoningBlock(start=0, stop=0, closed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thoughts:
    """The reasoning of a text that may have calls.

    Attributes:
        marks: The beginnings of calls, which count outside of it only.
        unclosed: Returns where a reasoning ends that begins at a position and is not closed.
        rule: The meaning of a call behind such a reasoning.
        first: The one before `Scan.start`; None if there is none.
    """

    thinking: Thinking
    marks: Container[str]
    unclosed: Callable[[int], int]
    rule: UnclosedReasoning
    first: ReasoningBlock | None


class Scan:
    """One text and the spans found in it.

    Args:
        start: Position where calls may begin, after the reasoning.
        new_id: Returns the id of a call without one, given its number and its name.
        thoughts: How it reasons; None if it does not.

    Attributes:
        position: The end of the last reported span.
    """

    def __init__(
        self,
        text: str,
        *,
        start: int,
        new_id: Callable[[int, str], str],
        thoughts: Thoughts | None = None,
    ) -> None:
        self.text = text
        self.position = start
        self._start = start
        self._new_id = new_id
        self._ids: set[str] = set()
        self._calls: list[ToolCall] = []
        self._starts: list[int] = []
        self._malformed: list[MalformedCall] = []
        self._content: list[str] = []
        self._framed = False
        self._known: dict[str, tuple[int, int]] = {}
        self._spans: list[tuple[int, int, bool | None]] = []
        self._thoughts = thoughts
        first = None if thoughts is None else thoughts.first
        self._blocks = [] if first is None else [first]
        self._seen = start  # up to where the blocks are known
        # Where reasoning ends that is never closed; found once, as it takes the rest of the text.
        self._last_calls = -1 if first is None or first.closed else first.stop

    def find(self, mark: str, start: int) -> int:
        """Returns the position of the first `mark` at or after `start`, or -1.

        One that begins a call is passed over inside reasoning.
        """
        return self.find_first(start, mark)

    def find_first(self, start: int, *marks: str) -> int:
        """Returns the position of the first of several marks at or after `start`, or -1.

        It looks no farther than that: what is behind may be read otherwise once this is reported.
        """
        found = {mark: at for mark in marks if (at := self._find(mark, start)) >= 0}
        while found:
            mark = min(found, key=found.__getitem__)
            place = found[mark]
            thoughts = self._thoughts
            if thoughts is None or mark not in thoughts.marks:
                return place
            stop = self._block_before(thoughts, place).stop
            if stop <= place:
                return place
            found[mark] = self._find(mark, stop)
            if found[mark] < 0:
                del found[mark]
        return -1

    def _find(self, mark: str, start: int) -> int:
        asked, found = self._known.get(mark, (len(self.text) + 1, -1))
        if not (asked <= start and (found < 0 or start <= found)):
            found = self.text.find(mark, start)
            self._known[mark] = (start, found)
        return found

    def call_starts(self, call: str, *around: str) -> Iterator[int]:
        """Yields the positions of the mark `call`, each after the last reported span.

        Reports the marks `around` the calls, and the white space after them, on the way.
        """
        while (start := self.find_first(self.position, call, *around)) >= 0:
            for mark in around:
                if self.text.startswith(mark, start):
                    self.mark(start, self.skip_space(start + len(mark)))
                    break
            else:
                yield start

    def skip_space(self, start: int) -> int:
        """Returns the position of the first non-space character at or after `start`."""
        match = _SPACE.match(self.text, start)
        assert match is not None
        return match.end()

    def after(self, mark: str, start: int) -> int:
        """Returns the position after `mark` if only white space precedes it, or -1."""
        place = self.skip_space(start)
        return place + len(mark) if self.text.startswith(mark, place) else -1

    def is_closed(self, start: int, mark: str, close: str) -> bool:
        """Returns whether `close` comes before the next `mark`."""
        first = self.find_first(start, mark, close)
        return first >= 0 and self.text.startswith(close, first)

    def end_of_call(self, start: int, *others: str, close: str | None = None) -> int:
        """Returns the end of a malformed call.

        It is after its closing mark, or before one of the other marks if that comes first. Without
        either it is the end of the text.
        """
        marks = others if close is None else (*others, close)
        place = self.find_first(start, *marks)
        if place < 0:
            return len(self.text)
        closed = close is not None and self.text.startswith(close, place)
        return place + len(close) if close is not None and closed else place

    def call(
        self,
        start: int,
        stop: int,
        *,
        name: str,
        arguments: Mapping[str, object],
        call_id: str | None = None,
    ) -> None:
        """Reports a call; replaces an id that is already taken."""
        thoughts = self._thoughts
        if (
            thoughts is not None
            and thoughts.rule is UnclosedReasoning.MALFORMED
            and not self._block_before(thoughts, start).closed
        ):
            mark = thoughts.thinking.close
            reason = f"the reasoning before it is not closed: write {mark} before the call"
            self.malformed(start, stop, reason=reason, name=name, call_id=call_id)
            return
        self._move(start, stop, is_call=True)
        call_id = self._free_id(call_id, name)
        self._calls.append(ToolCall(id=call_id, name=name, arguments=arguments))
        self._starts.append(start)

    def malformed(
        self,
        start: int,
        stop: int,
        *,
        reason: str,
        name: str | None = None,
        call_id: str | None = None,
    ) -> None:
        """Reports a span that was meant as a call; it stays in the content."""
        self._move(start, stop, is_call=False)
        span = self.text[start:stop]
        self._content.append(span)
        self._malformed.append(
            MalformedCall(
                id=self._free_id(call_id, name or ""),
                text=span,
                start=start,
                stop=stop,
                reason=reason,
                name=name or None,
            )
        )

    def mark(self, start: int, stop: int) -> None:
        """Reports a mark around calls, which is not content."""
        self._move(start, stop)

    def frame(self, start: int, stop: int) -> None:
        """Reports a mark around the content, which is not content even if there are no calls."""
        self._move(start, stop)
        self._framed = True

    def parsed(self, *, reasoning: str | None, content_start: int | None = None) -> ParsedText:
        """Returns the parsed text; text outside the reported spans is content.

        Args:
            content_start: Where the content begins; None: where calls may begin.
        """
        start = self._start if content_start is None else content_start
        content = self.text[start:]
        if self._calls or self._framed:
            before = self.text[start : self._start]
            content = "".join([before, *self._content, self.text[self.position :]])
        return ParsedText(
            content=content.strip() if self._calls else content,
            calls=tuple(self._calls),
            call_starts=tuple(self._starts),
            malformed=tuple(self._malformed),
            reasoning=reasoning,
            content_start=start,
        )

    def last_calls(self) -> int:
        """Returns where the calls begin with which the text ends; without any, its length."""
        begin, calls = len(self.text.rstrip()), False
        for start, stop, is_call in reversed(self._spans):
            if is_call is False or self.text[stop:begin].strip():
                break
            begin, calls = start, calls or is_call is True
        return begin if calls else len(self.text)

    def _move(self, start: int, stop: int, *, is_call: bool | None = None) -> None:
        """Reports a span: a call, a malformed one (False), or a mark (None)."""
        assert self.position <= start <= stop, "spans come from left to right"
        self._content.append(self.text[self.position : start])
        self.position = stop
        self._spans.append((start, stop, is_call))
        # What looked like reasoning within the span is a part of it.
        while self._blocks and self._blocks[-1].start >= start:
            self._blocks.pop()
            self._seen = stop
        self._seen = max(self._seen, stop)

    def _block_before(self, thoughts: Thoughts, place: int) -> ReasoningBlock:
        """Returns the last reasoning that begins before a position; an empty one if none does."""
        opening, closing = thoughts.thinking.open, thoughts.thinking.close
        while 0 <= (start := self._find(opening, self._seen)) <= place:
            end = self._find(closing, start + len(opening))
            if end < 0 and self._last_calls < start:
                self._last_calls = thoughts.unclosed(start)
            self._seen = self._last_calls if end < 0 else end + len(closing)
            self._blocks.append(ReasoningBlock(start=start, stop=self._seen, closed=end >= 0))
        before = (block for block in reversed(self._blocks) if block.start <= place)
        return next(before, _NO_BLOCK)

    def _free_id(self, wanted: str | None, name: str) -> str:
        number = len(self._calls) + len(self._malformed)
        while wanted is None or wanted in self._ids:
            wanted = self._new_id(number, name)
            number += 1
        self._ids.add(wanted)
        return wanted
