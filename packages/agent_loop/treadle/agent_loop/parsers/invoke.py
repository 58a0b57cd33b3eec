"""Calls as invoke elements in a block, as in MiniMax and the newer DeepSeek models.

    <minimax:tool_call>
    <invoke name="get_weather">
    <parameter name="city">Rome</parameter>
    </invoke>
    </minimax:tool_call>

Invariant: each element is parsed separately, so a malformed call does not affect the others. The
block's end may be missing. An argument is the unchanged text between its marks.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from treadle.agent_loop.parsers.format_parser import counted_id, writable
from treadle.agent_loop.parsers.json_text import CallError, read_value, write_json
from treadle.agent_loop.parsers.scan import Scan
from treadle.agent_loop.parsers.schema_values import Schemas
from treadle.agent_loop.types import ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class InvokeMarks:
    """The marks of one family.

    Attributes:
        block: Names of the element around the calls; the first one is written.
        prefix: Prefix of every other element's name.
        lead: Text that stands before each mark.
        typed: Whether parameters state if they are strings (`string="true"`) or JSON. Otherwise
            the tool's schema decides (`schema_values`).
    """

    block: tuple[str, ...]
    prefix: str = ""
    lead: str = ""
    typed: bool = False


class InvokeFormat:
    """Tool calls as invoke elements."""

    stop_tokens: tuple[str, ...] = ()
    leads: tuple[str, ...] = ()
    _between = "\n"  # the parts of a call

    def __init__(self, marks: InvokeMarks, *, gap: str) -> None:
        lead, prefix = marks.lead, marks.prefix
        self.gap = gap
        self._typed = marks.typed
        self._opens = tuple(f"{lead}<{name}>" for name in marks.block)
        self.marks = self._opens
        names = "|".join((*marks.block, *(f"{prefix}{name}" for name in ("invoke", "parameter"))))
        self.element: tuple[str, str] | None = (
            rf"{re.escape(lead)}<({names})[ >]",
            rf"{lead}</\1>",
        )
        self._closes = tuple(f"{lead}</{name}>" for name in marks.block)
        self._call = f"{lead}<{prefix}invoke"
        self._call_end = f"{lead}</{prefix}invoke>"
        self._parameter = f"{lead}<{prefix}parameter"
        self._parameter_end = f"{lead}</{prefix}parameter>"
        kind = ' string="(true|false)"' if marks.typed else "()"
        self._call_head = re.compile(f'{re.escape(self._call)} name="([^"<>\n]+)">')
        self._parameter_head = re.compile(f'{re.escape(self._parameter)} name="([^"<>\n]+)"{kind}>')

    def new_id(self, number: int, name: str) -> str:
        """As in `CallFormat`."""
        return counted_id(number, name)

    def read(self, scan: Scan, schemas: Schemas) -> None:
        """As in `CallFormat`."""
        place = scan.position
        while (start := scan.find_first(place, *self._opens)) >= 0:
            mark = next(mark for mark in self._opens if scan.text.startswith(mark, start))
            place = start + len(mark)
            closed = scan.is_closed(place, mark, self._closes[self._opens.index(mark)])
            if scan.after(self._call, place) < 0 and not closed:
                continue  # a mention in prose
            place = self._read_block(scan, schemas, start, place)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """As in `CallFormat`."""
        return "\n".join([self._opens[0], *map(self._write_call, calls), self._closes[0]])

    def _read_block(self, scan: Scan, schemas: Schemas, start: int, place: int) -> int:
        """Parses the calls of one block; returns the position after it."""
        scan.mark(start, scan.skip_space(place))
        while scan.position < len(scan.text):
            start = scan.position
            for close in self._closes:
                if scan.text.startswith(close, start):
                    scan.mark(start, start + len(close))
                    return scan.position
            try:
                name, arguments, stop = self._read_call(scan, schemas, start)
            except CallError as error:
                head = self._call_head.match(scan.text, start)
                # Search from inside the call's own mark, or from the text found in its place.
                body = start + (len(self._call) if head else 1)
                stop = scan.end_of_call(body, self._call, *self._closes, close=self._call_end)
                scan.malformed(start, stop, reason=str(error), name=head[1] if head else None)
            else:
                scan.call(start, stop, name=name, arguments=arguments)
            scan.mark(stop, scan.skip_space(stop))
        return scan.position

    def _read_call(
        self, scan: Scan, schemas: Schemas, start: int
    ) -> tuple[str, dict[str, object], int]:
        """Parses one element; returns name, arguments and the position after it."""
        head = self._call_head.match(scan.text, start)
        if head is None:
            raise CallError(f'the call must begin with {self._call} name="NAME">')
        arguments, stop = self._read_arguments(scan, schemas, head[1], head.end())
        return head[1], arguments, stop

    def _read_arguments(
        self, scan: Scan, schemas: Schemas, name: str, place: int
    ) -> tuple[dict[str, object], int]:
        """Parses the parameters of a call; returns them and the position after the call."""
        arguments: dict[str, object] = {}
        while (stop := scan.after(self._call_end, place)) < 0:
            place = scan.skip_space(place)
            parameter = self._parameter_head.match(scan.text, place)
            if parameter is None:
                raise CallError(self._unexpected(scan.text[place : place + 40]))
            key, begin = parameter[1], parameter.end()
            end = scan.find(self._parameter_end, begin)
            if end < 0 or 0 <= scan.find(self._parameter, begin) < end:
                raise CallError(f"the parameter {key!r} is not closed by {self._parameter_end}")
            if key in arguments:
                raise CallError(f"the parameter {key!r} is given twice")
            text = scan.text[begin:end]
            arguments[key] = (
                _typed_value(key, text, is_text=parameter[2] == "true")
                if self._typed
                else schemas.read(name, key, text)
            )
            place = end + len(self._parameter_end)
        return arguments, stop

    def _unexpected(self, found: str) -> str:
        if not found:
            return f"the call is not closed by {self._call_end}"
        wanted = f'{self._parameter} name="NAME"' + (
            ' string="true|false">' if self._typed else ">"
        )
        return f"expected {wanted} or {self._call_end}, got {found!r}"

    def _write_call(self, call: ToolCall) -> str:
        head = f'{self._call} name="{_attribute(call.name)}">'
        return self._between.join([head, *self._write_arguments(call.arguments), self._call_end])

    def _write_arguments(self, arguments: Mapping[str, object]) -> Iterator[str]:
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            text = value if isinstance(value, str) else write_json(value)
            kind = f' string="{str(is_text).lower()}"' if self._typed else ""
            head = f'{self._parameter} name="{_attribute(key)}"{kind}>'
            yield head + writable(text, self._parameter, self._parameter_end) + self._parameter_end


def _typed_value(key: str, text: str, *, is_text: bool) -> object:
    if is_text:
        return text
    try:
        return read_value(text)
    except CallError as error:
        raise CallError(
            f'the parameter {key!r} has string="false", and {error}; a text has string="true"'
        ) from None


def _attribute(text: str) -> str:
    if not text:
        raise ValueError("the format cannot write an empty name")
    return writable(text, '"', "<", ">", "\n")
