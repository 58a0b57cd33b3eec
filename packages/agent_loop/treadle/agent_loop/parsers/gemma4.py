"""The format of Gemma 4: a call with braces, whose texts stand between marks.

    <|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:3,deep:{a:[1,<|"|>b<|"|>]}}<tool_call|>

The turn ends with `<|tool_response>`, behind which the template puts the results. Invariant: a text
ends at the next `<|"|>` and holds no mark of a call. A value without marks is read as a number,
true, false or null if the tool's schema or its form allows, otherwise as a text: models sometimes
leave the marks out.
"""

import re
from collections.abc import Sequence

from treadle.agent_loop.parsers.format_parser import counted_id, writable
from treadle.agent_loop.parsers.json_text import MAX_DEPTH, CallError, write_json
from treadle.agent_loop.parsers.scan import Scan
from treadle.agent_loop.parsers.schema_values import Schemas, read_as
from treadle.agent_loop.types import ToolCall

_OPEN, _CLOSE = "<|tool_call>", "<tool_call|>"
_QUOTE = '<|"|>'
_HEAD = re.compile(r"call:([^{}<>:\s]+)\{")
_KEY = re.compile(r"[^{}\[\]<>,:]+")
_BARE = re.compile(r"[^{}\[\]<>,]+")
_ANY = frozenset({"null", "boolean", "integer", "number", "string"})


class Gemma4Format:
    """Gemma 4 tool calls."""

    stop_tokens: tuple[str, ...] = ("<|tool_response>",)
    marks: tuple[str, ...] = (_OPEN,)
    element: tuple[str, str] | None = (re.escape(_OPEN), _CLOSE)
    leads: tuple[str, ...] = ()
    gap = ""

    def new_id(self, number: int, name: str) -> str:
        """As in `CallFormat`."""
        return counted_id(number, name)

    def read(self, scan: Scan, schemas: Schemas) -> None:
        """As in `CallFormat`."""
        place = scan.position
        while (start := scan.find(_OPEN, place)) >= 0:
            body = place = start + len(_OPEN)
            head = _HEAD.match(scan.text, scan.skip_space(body))
            if head is None and not scan.is_closed(body, _OPEN, _CLOSE):
                continue  # a mention in prose
            name = head[1] if head is not None else None
            try:
                if head is None:
                    raise CallError(f"the call must begin with {_OPEN}call:NAME{{")
                arguments, stop = _Reader(scan, schemas, head[1]).read_object(head.end(), 0)
                place = scan.after(_CLOSE, stop)
                if place < 0:
                    raise CallError(f"the call is not closed by {_CLOSE}")
            except CallError as error:
                place = scan.end_of_call(body, _OPEN, close=_CLOSE)
                scan.malformed(start, place, reason=str(error), name=name)
            else:
                scan.call(start, place, name=head[1], arguments=arguments)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """As in `CallFormat`."""
        return "".join(
            f"{_OPEN}call:{_name(c.name)}{_write(dict(c.arguments))}{_CLOSE}" for c in calls
        )


class _Reader:
    """Reads the values of one call."""

    def __init__(self, scan: Scan, schemas: Schemas, tool: str) -> None:
        self._scan = scan
        self._schemas = schemas
        self._tool = tool

    def read_object(self, place: int, depth: int) -> tuple[dict[str, object], int]:
        """Parses from behind the opening brace; returns keys and values, and the position after."""
        scan, found = self._scan, dict[str, object]()
        if (stop := scan.after("}", place)) >= 0:
            return found, stop
        while True:
            key, place = self._key(scan.skip_space(place))
            if key in found:
                raise CallError(f"the argument {key!r} is given twice")
            found[key], place = self._value(scan.skip_space(place), depth, key)
            if (stop := scan.after("}", place)) >= 0:
                return found, stop
            place = self._comma(place, "}")

    def _list(self, place: int, depth: int) -> tuple[list[object], int]:
        scan, found = self._scan, list[object]()
        if (stop := scan.after("]", place)) >= 0:
            return found, stop
        while True:
            value, place = self._value(scan.skip_space(place), depth, None)
            found.append(value)
            if (stop := scan.after("]", place)) >= 0:
                return found, stop
            place = self._comma(place, "]")

    def _key(self, place: int) -> tuple[str, int]:
        if self._scan.text.startswith(_QUOTE, place):
            key, stop = self._text(place)
        else:
            bare = _KEY.match(self._scan.text, place)
            if bare is None:
                raise CallError(f"expected NAME:VALUE, got {self._scan.text[place : place + 20]!r}")
            key, stop = bare[0].strip(), bare.end()
        after = self._scan.after(":", stop)
        if after < 0:
            raise CallError(f"the argument {key!r} has no value: write {key}:VALUE")
        return key, after

    def _value(self, place: int, depth: int, key: str | None) -> tuple[object, int]:
        """Parses one value; `key` is its name in the call, or in an object of it."""
        text = self._scan.text
        if depth >= MAX_DEPTH:
            raise CallError(f"the arguments are nested too deeply: {MAX_DEPTH} levels are taken")
        if text.startswith(_QUOTE, place):
            return self._text(place)
        if text.startswith("{", place):
            return self.read_object(place + 1, depth + 1)
        if text.startswith("[", place):
            return self._list(place + 1, depth + 1)
        bare = _BARE.match(text, place)
        if bare is None or not bare[0].strip():
            raise CallError(f"expected a value, got {text[place : place + 20]!r}")
        word = bare[0].strip()
        if depth == 0 and key is not None:
            types = self._schemas.of(self._tool, key).types
            return read_as(word, types or _ANY), bare.end()
        return read_as(word, _ANY), bare.end()

    def _text(self, place: int) -> tuple[str, int]:
        begin = place + len(_QUOTE)
        end = self._scan.find(_QUOTE, begin)
        if end < 0 or 0 <= self._scan.find(_OPEN, begin) < end:
            raise CallError(f"a text is not closed by {_QUOTE}")
        return self._scan.text[begin:end], end + len(_QUOTE)

    def _comma(self, place: int, close: str) -> int:
        after = self._scan.after(",", place)
        if after < 0:
            found = self._scan.text[place : place + 20]
            raise CallError(f"expected , or {close}, got {found!r}")
        return after


def _write(value: object) -> str:
    match value:
        case str():
            return _QUOTE + writable(value, _QUOTE, _OPEN) + _QUOTE
        case dict():
            items = (f"{_write_key(str(key))}:{_write(item)}" for key, item in value.items())
            return "{" + ",".join(items) + "}"
        case list() | tuple():
            return "[" + ",".join(map(_write, value)) + "]"
        case None:
            return "None"  # as the template writes it
        case _:
            return write_json(value)


def _write_key(key: str) -> str:
    bare = _KEY.fullmatch(key)
    return key if bare is not None and key == key.strip() else _write(key)


def _name(name: str) -> str:
    if _HEAD.fullmatch(f"call:{name}{{") is None:
        raise ValueError(f"the format cannot write the name {name!r}")
    return name
