"""The format of GLM-4.5 to 4.7 and similar models: marked keys and values, plain text arguments.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Rome</arg_value>
    </tool_call>

GLM-4.7 leaves out the line feeds. Invariant: an argument is the unchanged text between its marks;
the tool's schema gives its type (`schema_values`). The mark opens a call only if an argument
follows it, or if it is closed before the next one.
"""

import re
from collections.abc import Sequence

from treadle.agent_loop.parsers.format_parser import counted_id, writable
from treadle.agent_loop.parsers.json_text import CallError, write_json
from treadle.agent_loop.parsers.scan import Scan
from treadle.agent_loop.parsers.schema_values import Schemas
from treadle.agent_loop.types import ToolCall

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[^<>{}\n]*")


class GlmFormat:
    """GLM tool calls."""

    stop_tokens: tuple[str, ...] = ()
    marks: tuple[str, ...] = (_OPEN,)
    element: tuple[str, str] | None = ("<(tool_call|arg_key|arg_value)>", r"</\1>")
    leads: tuple[str, ...] = ()
    gap = "\n"

    def new_id(self, number: int, name: str) -> str:
        """As in `CallFormat`."""
        return counted_id(number, name)

    def read(self, scan: Scan, schemas: Schemas) -> None:
        """As in `CallFormat`."""
        place = scan.position
        while (start := scan.find(_OPEN, place)) >= 0:
            head = _NAME.match(scan.text, scan.skip_space(start + len(_OPEN)))
            assert head is not None
            name, place = head[0].strip(), head.end()
            if scan.after(_KEY, place) < 0 and not scan.is_closed(place, _OPEN, _CLOSE):
                continue  # a mention in prose
            try:
                arguments, place = _read_arguments(scan, schemas, name, place)
            except CallError as error:
                place = scan.end_of_call(place, _OPEN, close=_CLOSE)
                scan.malformed(start, place, reason=str(error), name=name)
            else:
                scan.call(start, place, name=name, arguments=arguments)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """As in `CallFormat`."""
        return "\n".join(_write_call(call) for call in calls)


def _read_arguments(
    scan: Scan, schemas: Schemas, name: str, place: int
) -> tuple[dict[str, object], int]:
    """Parses the text after the name; returns the arguments and the position after the call."""
    if not name:
        raise CallError("the call has no name: write it right after <tool_call>")
    arguments: dict[str, object] = {}
    while (stop := scan.after(_CLOSE, place)) < 0:
        start = scan.after(_KEY, place)
        if start < 0:
            place = scan.skip_space(place)
            found = scan.text[place : place + 20]
            raise CallError(
                f"expected {_KEY} or {_CLOSE}, got {found!r}"
                if found
                else f"the call is not closed by {_CLOSE}"
            )
        end = scan.find(_KEY_END, start)
        if end < 0 or scan.find("<", start) < end:
            raise CallError(f"{_KEY} is not closed by {_KEY_END}")
        key = scan.text[start:end].strip()
        start = scan.after(_VALUE, end + len(_KEY_END))
        if start < 0:
            raise CallError(f"the argument {key!r} has no {_VALUE}")
        end = scan.find(_VALUE_END, start)
        if end < 0 or 0 <= scan.find(_VALUE, start) < end:
            raise CallError(f"the argument {key!r} is not closed by {_VALUE_END}")
        if key in arguments:
            raise CallError(f"the argument {key!r} is given twice")
        arguments[key] = schemas.read(name, key, scan.text[start:end])
        place = end + len(_VALUE_END)
    return arguments, stop


def _write_call(call: ToolCall) -> str:
    lines = [_OPEN + _bare(call.name)]
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else write_json(value)
        lines.append(f"{_KEY}{_bare(key)}{_KEY_END}")
        lines.append(f"{_VALUE}{writable(text, _VALUE, _VALUE_END)}{_VALUE_END}")
    return "\n".join([*lines, _CLOSE])


def _bare(name: str) -> str:
    if name != name.strip() or not name:
        raise ValueError(f"the format cannot write the name {name!r}")
    return writable(name, "<", ">", "{", "}", "\n")
