"""The format of Qwen3-Coder and Qwen3.5: XML-like, arguments as plain text.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Rome
    </parameter>
    </function>
    </tool_call>

Invariant: an argument ends at the first `</parameter>`; one line break on either side belongs to
the template. A `<parameter=` that begins a line before it is the next argument, and this one was
not closed; elsewhere it is text. The tool's schema gives its type (`schema_values`). The models
sometimes leave out `<tool_call>`; a complete `<function=...></function>` without it is a call too.
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
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_NEXT_PARAMETER = f"\n{_PARAMETER}"
_PARAMETER_END = "</parameter>"
_FUNCTION_HEAD = re.compile(r"<function=([^<>\n]+)>")
_PARAMETER_HEAD = re.compile(r"<parameter=([^<>\n]+)>")


class Qwen3CoderFormat:
    """Qwen3-Coder tool calls."""

    stop_tokens: tuple[str, ...] = ()
    marks: tuple[str, ...] = (_OPEN, _FUNCTION)
    element: tuple[str, str] | None = (r"<(tool_call|function|parameter)[=>]", r"</\1>")
    leads: tuple[str, ...] = ()
    gap = "\n\n"

    def new_id(self, number: int, name: str) -> str:
        """As in `CallFormat`."""
        return counted_id(number, name)

    def read(self, scan: Scan, schemas: Schemas) -> None:
        """As in `CallFormat`."""
        place = scan.position
        while (start := scan.find_first(place, _OPEN, _FUNCTION)) >= 0:
            wrapped = scan.text.startswith(_OPEN, start)
            read = self._read_wrapped if wrapped else self._read_bare
            place = read(scan, schemas, start)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """As in `CallFormat`."""
        return "\n".join(_write_call(call) for call in calls)

    def _read_wrapped(self, scan: Scan, schemas: Schemas, start: int) -> int:
        body = scan.skip_space(start + len(_OPEN))
        if not (scan.text.startswith(_FUNCTION, body) or scan.is_closed(body, _OPEN, _CLOSE)):
            return start + len(_OPEN)  # a mention in prose
        try:
            name, arguments, stop = _read_function(scan, schemas, body)
            stop = scan.after(_CLOSE, stop)
            if stop < 0:
                raise CallError(f"the call is not closed by {_CLOSE}")
        except CallError as error:
            stop = scan.end_of_call(body, _OPEN, close=_CLOSE)
            scan.malformed(start, stop, reason=str(error), name=_named_at(scan, body))
        else:
            scan.call(start, stop, name=name, arguments=arguments)
        return stop

    def _read_bare(self, scan: Scan, schemas: Schemas, start: int) -> int:
        end = scan.find(_FUNCTION_END, start)
        if end < 0:
            return start + len(_FUNCTION)
        try:
            name, arguments, stop = _read_function(scan, schemas, start)
        except CallError as error:
            stop = _closed(scan, end + len(_FUNCTION_END))
            scan.malformed(start, stop, reason=str(error), name=_named_at(scan, start))
        else:
            stop = _closed(scan, stop)
            scan.call(start, stop, name=name, arguments=arguments)
        return stop


def _read_function(scan: Scan, schemas: Schemas, start: int) -> tuple[str, dict[str, object], int]:
    """Parses from `<function=` on; returns name, arguments and the position after it."""
    head = _FUNCTION_HEAD.match(scan.text, start)
    if head is None or not head[1].strip():
        raise CallError("the call must begin with <function=NAME>")
    name, arguments, place = head[1].strip(), dict[str, object](), head.end()
    while (stop := scan.after(_FUNCTION_END, place)) < 0:
        place = scan.skip_space(place)
        parameter = _PARAMETER_HEAD.match(scan.text, place)
        if parameter is None:
            found = scan.text[place : place + 20]
            raise CallError(
                f"expected {_PARAMETER}NAME> or {_FUNCTION_END}, got {found!r}"
                if found
                else f"the call is not closed by {_FUNCTION_END}"
            )
        key, start = parameter[1].strip(), parameter.end()
        end = scan.find(_PARAMETER_END, start)
        if end < 0 or 0 <= scan.find(_NEXT_PARAMETER, start) < end:
            raise CallError(f"the parameter {key!r} is not closed by {_PARAMETER_END}")
        if key in arguments:
            raise CallError(f"the parameter {key!r} is given twice")
        arguments[key] = schemas.read(name, key, _without_breaks(scan.text[start:end]))
        place = end + len(_PARAMETER_END)
    return name, arguments, stop


def _without_breaks(text: str) -> str:
    """Returns the text without the line break on either side, which may be one of Windows."""
    begin = 2 if text.startswith("\r\n") else text.startswith("\n")
    text = text[begin:]
    return text[: -2 if text.endswith("\r\n") else len(text) - text.endswith("\n")]


def _closed(scan: Scan, stop: int) -> int:
    """Returns the position after a `</tool_call>` that follows a call without `<tool_call>`."""
    closed = scan.after(_CLOSE, stop)
    return stop if closed < 0 else closed


def _named_at(scan: Scan, start: int) -> str | None:
    head = _FUNCTION_HEAD.match(scan.text, start)
    return head[1].strip() if head else None


def _write_call(call: ToolCall) -> str:
    lines = [_OPEN, f"{_FUNCTION}{_tag(call.name)}>"]
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else write_json(value)
        lines.append(f"{_PARAMETER}{_tag(key)}>")
        lines.append(writable(f"\n{text}", _NEXT_PARAMETER, _PARAMETER_END)[1:])
        lines.append(_PARAMETER_END)
    return "\n".join([*lines, _FUNCTION_END, _CLOSE])


def _tag(name: str) -> str:
    if name != name.strip() or not name:
        raise ValueError(f"the format cannot write the name {name!r}")
    return writable(name, "<", ">", "\n")
