"""The format of MiniMax-M3: invoke elements, whose arguments are elements too, at any depth.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Rome]<]minimax[>[</city>
    ]<]minimax[>[<days>]<]minimax[>[<item>3]<]minimax[>[</item>]<]minimax[>[</days>
    ]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

(a call in one line). Each mark begins with a special token, so a text may hold any other mark.
Objects are elements named by their keys, arrays are elements named `item`. The tool's schema gives
the types and distinguishes arrays from objects (`schema_values`). Values that elements cannot
express (null, empty lists, texts that look like numbers) are JSON in the argument's element.
"""

import re
from collections.abc import Iterator, Mapping

from treadle.agent_loop.parsers.format_parser import writable
from treadle.agent_loop.parsers.invoke import InvokeFormat, InvokeMarks
from treadle.agent_loop.parsers.json_text import MAX_DEPTH, CallError, write_json
from treadle.agent_loop.parsers.scan import Scan
from treadle.agent_loop.parsers.schema_values import Schemas, ValueSchema, read_as

_LEAD = "]<]minimax[>["
_BLOCK, _ITEM = "tool_call", "item"
_NAME = re.compile(r"[^<>/\s]+")
_OPEN = re.compile(rf"{re.escape(_LEAD)}<({_NAME.pattern})>")
_ANY: frozenset[str] = frozenset()

_Element = str | list[tuple[str, "_Element"]]


class MinimaxM3Format(InvokeFormat):
    """MiniMax-M3 tool calls."""

    _between = ""

    def __init__(self) -> None:
        super().__init__(InvokeMarks(block=(_BLOCK,), lead=_LEAD), gap="")
        self.element = (rf"{re.escape(_LEAD)}<({_NAME.pattern})[ >]", rf"{_LEAD}</\1>")

    def _read_arguments(
        self, scan: Scan, schemas: Schemas, name: str, place: int
    ) -> tuple[dict[str, object], int]:
        arguments: dict[str, object] = {}
        while (stop := scan.after(self._call_end, place)) < 0:
            place = scan.skip_space(place)
            head = _OPEN.match(scan.text, place)
            if head is None or not _is_name(head[1]):
                found = scan.text[place : place + 40]
                raise CallError(
                    f"expected {_LEAD}<NAME> or {self._call_end}, got {found!r}"
                    if found
                    else f"the call is not closed by {self._call_end}"
                )
            key = head[1]
            if key in arguments:
                raise CallError(f"the argument {key!r} is given twice")
            element, place = _read_element(scan, key, head.end(), 0)
            arguments[key] = _value(element, schemas.of(name, key))
        return arguments, stop

    def _write_arguments(self, arguments: Mapping[str, object]) -> Iterator[str]:
        return (_write_argument(key, value) for key, value in arguments.items())


def _read_element(scan: Scan, name: str, place: int, depth: int) -> tuple[_Element, int]:
    """Parses from behind an opening mark; returns text or elements, and the position after it."""
    if depth >= MAX_DEPTH:
        raise CallError(f"the arguments are nested too deeply: {MAX_DEPTH} levels are taken")
    close = f"{_LEAD}</{name}>"
    begin, elements = place, list[tuple[str, _Element]]()
    while True:
        mark = scan.find(_LEAD, place)
        if mark < 0:
            raise CallError(f"<{name}> is not closed by {close}")
        between = scan.text[place:mark]
        if scan.text.startswith(close, mark):
            if elements and between.strip():
                raise CallError(f"<{name}> has a text beside elements: {between.strip()[:20]!r}")
            return elements or scan.text[begin:mark], mark + len(close)
        head = _OPEN.match(scan.text, mark)
        if head is None or not _is_name(head[1]) or between.strip():
            found = scan.text[mark : mark + 40]
            raise CallError(f"expected {close}, got {found!r}")
        element, place = _read_element(scan, head[1], head.end(), depth + 1)
        elements.append((head[1], element))


def _value(element: _Element, schema: ValueSchema) -> object:
    types = schema.types
    if isinstance(element, str):
        if not element.strip() and types in ({"array"}, {"object"}):
            return [] if types == {"array"} else {}
        return read_as(element, types)
    only_items = all(name == _ITEM for name, _ in element)
    if only_items and ("array" in types or "object" not in types):
        return [_value(item, schema.of_items()) for _, item in element]
    found: dict[str, object] = {}
    for name, inner in element:
        if name in found:
            raise CallError(f"the element {name!r} is given twice")
        found[name] = _value(inner, schema.of_key(name))
    return found


def _write_argument(key: str, value: object) -> str:
    if not _is_name(key):
        raise ValueError(f"the format cannot write the name {key!r}")
    inside = value if isinstance(value, str) else _elements(value)
    if isinstance(value, dict | list) and inside is not None:
        return _wrapped(key, inside)
    return _wrapped(key, writable(write_json(value) if inside is None else inside, _LEAD))


def _is_name(text: str) -> bool:
    """Returns whether an element can have this name: not that of the block around the calls."""
    return text != _BLOCK and _LEAD not in text and _NAME.fullmatch(text) is not None


def _wrapped(name: str, inside: str) -> str:
    return f"{_LEAD}<{name}>{inside}{_LEAD}</{name}>"


def _elements(value: object) -> str | None:
    """Returns a value as text or elements; None if they would be read as something else."""
    if isinstance(value, list):
        named = [(_ITEM, item) for item in value]
    elif isinstance(value, dict):
        named = [(str(key), item) for key, item in value.items()]
        if all(name == _ITEM for name, _ in named):
            return None
    else:
        text = value if isinstance(value, str) else write_json(value)
        same = value is not None and _LEAD not in text and read_as(text, _ANY) == value
        return text if same and type(read_as(text, _ANY)) is type(value) else None
    parts = []
    for name, item in named:
        inside = _elements(item) if _is_name(name) else None
        if inside is None:
            return None
        parts.append(_wrapped(name, inside))
    return "".join(parts) or None
