"""The scan of one text: finds marks, and collects the spans that a format reports.

Invariants: spans are reported from left to right and do not overlap; text outside of them is
content. Searches for a mark from increasing positions cost one pass over the text in total, so a
parser that fails at each of a thousand opening marks is still linear.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from treadle.agent_loop.parsers.base import ParsedText
from treadle.agent_loop.tokens.renderer import MalformedCall
from treadle.agent_loop.types import ToolCall

_SPACE = re.compile(r"\s*")


class Scan:
    """One text and the spans found in it.

    Args:
        text: A decoded completion.
        start: Position where calls may begin, after the reasoning.
        new_id: Returns the id of a call without one, given its number and its name.

    Attributes:
        text: The decoded completion.
        position: The end of the last reported span.
    """

    def __init__(self, text: str, *, start: int, new_id: Callable[[int, str], str]) -> None:
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

    def find(self, mark: str, start: int) -> int:
        """Returns the position of the first `mark` at or after `start`, or -1."""
        asked, found = self._known.get(mark, (len(self.text) + 1, -1))
        if not (asked <= start and (found < 0 or start <= found)):
            found = self.text.find(mark, start)
            self._known[mark] = (start, found)
        return found

    def find_first(self, start: int, *marks: str) -> int:
        """Returns the position of the first of several marks at or after `start`, or -1."""
        return min((at for mark in marks if (at := self.find(mark, start)) >= 0), default=-1)

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
        end, again = self.find(close, start), self.find(mark, start)
        return end >= 0 and not 0 <= again < end

    def end_of_call(self, start: int, *others: str, close: str | None = None) -> int:
        """Returns the end of a malformed call.

        It is after its closing mark, or before one of the other marks if that comes first. Without
        either it is the end of the text.
        """
        limit = self.find_first(start, *others)
        place = self.find(close, start) if close is not None else -1
        if close is not None and place >= 0 and (limit < 0 or place < limit):
            return place + len(close)
        return len(self.text) if limit < 0 else limit

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
        self._move(start, stop)
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
        self._move(start, stop)
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

    def parsed(self, *, reasoning: str | None) -> ParsedText:
        """Returns the parsed text; text outside the reported spans is content."""
        content = self.text[self._start :]
        if self._calls or self._framed:
            content = "".join([*self._content, self.text[self.position :]])
        return ParsedText(
            content=content.strip() if self._calls else content,
            calls=tuple(self._calls),
            call_starts=tuple(self._starts),
            malformed=tuple(self._malformed),
            reasoning=reasoning,
            content_start=self._start,
        )

    def _move(self, start: int, stop: int) -> None:
        assert self.position <= start <= stop, "spans come from left to right"
        self._content.append(self.text[self.position : start])
        self.position = stop

    def _free_id(self, wanted: str | None, name: str) -> str:
        number = len(self._calls) + len(self._malformed)
        while wanted is None or wanted in self._ids:
            wanted = self._new_id(number, name)
            number += 1
        self._ids.add(wanted)
        return wanted
