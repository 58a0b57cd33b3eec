"""The format of Liquid's LFM2 models: a list of calls, as Python writes them.

    <|tool_call_start|>[get_weather(city='Rome', days=3), now()]<|tool_call_end|>

Invariant: nothing is evaluated; an argument is a literal: text, number, True, False, None, list or
dictionary (`true`, `false` and `null` are read too). The templates write texts without escaping
what is in them, so a quote closes a text only where something follows that may: a comma, a colon or
a closing bracket.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from treadle.agent_loop.parsers.format_parser import counted_id, writable
from treadle.agent_loop.parsers.json_text import MAX_DEPTH, CallError, read_value, write_json
from treadle.agent_loop.parsers.scan import Scan
from treadle.agent_loop.parsers.schema_values import Schemas
from treadle.agent_loop.types import ToolCall

_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_WORD = re.compile(r"[\w.+-]+")
_SPACE = re.compile(r"\s*")
_IN_TEXT = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5}|.)|['\"]", re.DOTALL
)
_CLOSES_TEXT = re.compile(r"\s*[,:)\]}]")
_WORDS: Mapping[str, object] = MappingProxyType(
    {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
)
_ESCAPES: Mapping[str, str] = MappingProxyType(
    {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", **{c: c for c in "\\'\"/"}}
)


class Lfm2Format:
    """LFM2 tool calls."""

    stop_tokens: tuple[str, ...] = ()
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
            opened = scan.text.startswith("[", scan.skip_space(body))
            if opened or scan.is_closed(body, _OPEN, _CLOSE):
                place = _read_block(scan, start, body)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """As in `CallFormat`."""
        return f"{_OPEN}[{', '.join(map(_write_call, calls))}]{_CLOSE}"


def _read_block(scan: Scan, start: int, body: int) -> int:
    """Parses the calls of one list; returns the position after it."""
    end = scan.find_first(body, _CLOSE, _OPEN)
    limit = len(scan.text) if end < 0 else end
    stop = limit + len(_CLOSE) if scan.text.startswith(_CLOSE, limit) else limit
    reader = _Reader(scan.text[body:limit])
    begin = seen = start
    try:
        reader.expect("[")
        while not reader.take("]"):
            begin = body + reader.skip_space()
            scan.mark(seen, begin)
            seen = begin
            name, arguments = reader.call()
            seen = body + reader.place
            scan.call(begin, seen, name=name, arguments=arguments)
            begin = seen
            if not reader.take(","):
                reader.expect("]")
                break
        if stop == limit:
            raise CallError(f"the calls are not closed by {_CLOSE}")
        if reader.skip_space() < limit - body:
            raise CallError(f"extra text after the list of calls: {reader.rest()!r}")
    except CallError as error:
        named = _NAME.match(scan.text, begin)
        known = named[0] if named is not None and begin > start else None
        scan.malformed(begin, stop, reason=str(error), name=known)
    else:
        scan.mark(seen, stop)
    return stop


class _Reader:
    """Reads calls and literals from one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.place = 0

    def skip_space(self) -> int:
        """Returns the position of the next character that is not space."""
        found = _SPACE.match(self._text, self.place)
        assert found is not None
        self.place = found.end()
        return self.place

    def rest(self) -> str:
        """Returns the next few characters, for errors."""
        return self._text[self.place : self.place + 20]

    def take(self, mark: str) -> bool:
        """Passes a mark, and returns whether it was there."""
        if self._text.startswith(mark, self.skip_space()):
            self.place += len(mark)
            return True
        return False

    def expect(self, mark: str) -> None:
        """Passes a mark that must be there."""
        if not self.take(mark):
            raise CallError(f"expected {mark}, got {self.rest()!r}")

    def call(self) -> tuple[str, dict[str, object]]:
        """Parses NAME(KEY=VALUE, ...)."""
        name = self._match(_NAME, "NAME(ARGUMENT=VALUE)")
        self.expect("(")
        arguments: dict[str, object] = {}
        while not self.take(")"):
            key = self._match(_NAME, "ARGUMENT=VALUE")
            if key in arguments:
                raise CallError(f"the argument {key!r} is given twice")
            self.expect("=")
            arguments[key] = self._value(0)
            if not self.take(","):
                self.expect(")")
                break
        return name, arguments

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        found = pattern.match(self._text, self.skip_space())
        if found is None:
            raise CallError(f"expected {what}, got {self.rest()!r}")
        self.place = found.end()
        return found[0]

    def _value(self, depth: int) -> object:
        if depth >= MAX_DEPTH:
            raise CallError(f"the arguments are nested too deeply: {MAX_DEPTH} levels are taken")
        if self.take("["):
            return self._items("]", depth)
        if self.take("("):
            return self._items(")", depth)
        if self.take("{"):
            return self._dictionary(depth)
        if self._text[self.place : self.place + 1] in ("'", '"'):
            return self._quoted()
        word = self._match(_WORD, "a value")
        if word in _WORDS:
            return _WORDS[word]
        try:
            return read_value(word)
        except CallError:
            wanted = "a text in quotes, a number, True, False or None"
            raise CallError(f"expected {wanted}, got {word[:40]!r}") from None

    def _items(self, close: str, depth: int) -> list[object]:
        items: list[object] = []
        while not self.take(close):
            items.append(self._value(depth + 1))
            if not self.take(","):
                self.expect(close)
                break
        return items

    def _dictionary(self, depth: int) -> dict[str, object]:
        found: dict[str, object] = {}
        while not self.take("}"):
            key = self._value(depth + 1)
            if not isinstance(key, str):
                raise CallError(f"the key {key!r} of a dictionary is not a string")
            self.expect(":")
            found[key] = self._value(depth + 1)
            if not self.take(","):
                self.expect("}")
                break
        return found

    def _quoted(self) -> str:
        quote, parts = self._text[self.place], list[str]()
        seen = self.place + 1
        for found in _IN_TEXT.finditer(self._text, seen):
            if found[0].startswith("\\"):
                parts += (self._text[seen : found.start()], _unescaped(found[0]))
                seen = found.end()
            elif found[0] == quote and _CLOSES_TEXT.match(self._text, found.end()):
                self.place = found.end()
                return _whole("".join([*parts, self._text[seen : found.start()]]))
        raise CallError(f"a text is not closed by {quote}")


def _unescaped(escape: str) -> str:
    kind = escape[1]
    if kind in "xuU" and len(escape) > 2:
        return chr(int(escape[2:], 16))
    return _ESCAPES.get(kind, escape)


def _whole(text: str) -> str:
    """Joins characters that were escaped in halves.

    Raises:
        CallError: One half is missing.
    """
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise CallError("a text holds half of a character") from None


def _write_call(call: ToolCall) -> str:
    arguments = (f"{_name(key)}={_literal(value)}" for key, value in call.arguments.items())
    return f"{_name(call.name)}({', '.join(arguments)})"


def _literal(value: object) -> str:
    match value:
        case str():
            escaped = writable(value, _OPEN, _CLOSE).replace("\\", "\\\\").replace("'", "\\'")
            return f"'{escaped}'"
        case bool() | None:
            return str(value)
        case list():
            return f"[{', '.join(map(_literal, value))}]"
        case dict():
            return writable(write_json(value), _OPEN, _CLOSE)  # as the template writes it
        case _:
            return write_json(value)


def _name(text: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise ValueError(f"the format cannot write the name {text!r}")
    return text
