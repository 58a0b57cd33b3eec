"""The formats of Mistral's models: JSON after [TOOL_CALLS].

Up to Nemo, all calls are one JSON list. Later models write a mark, a name and arguments per call,
some with an id:

    [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "call00000"}]
    [TOOL_CALLS]f[ARGS]{"a": 1}
    [TOOL_CALLS]f[CALL_ID]call00000[ARGS]{"a": 1}

All are parsed; the third is written, or the first with `as_list`. Invariant: an id is kept as the
model wrote it; generated ids have nine letters and digits, because the templates require that.
Reasoning (`[THINK]...[/THINK]`) is content, because the templates expect it there.
"""

import re
from collections.abc import Sequence

from treadle.agent_loop.parsers.format_parser import writable
from treadle.agent_loop.parsers.json_list import ItemKeys, read_list
from treadle.agent_loop.parsers.json_text import CallError, read_object, write_json
from treadle.agent_loop.parsers.scan import Scan
from treadle.agent_loop.parsers.schema_values import Schemas
from treadle.agent_loop.types import ToolCall

_MARK = "[TOOL_CALLS]"
_CALL_ID, _ARGUMENTS = "[CALL_ID]", "[ARGS]"
_HEAD = re.compile(r"([^\[\]{}\n]+)(?:\[CALL_ID\]([^\[\]{}\n]*))?\[ARGS\]")


class MistralFormat:
    """Mistral tool calls.

    Args:
        as_list: Whether to write the older format.
    """

    stop_tokens: tuple[str, ...] = ()
    marks: tuple[str, ...] = (_MARK,)
    element: tuple[str, str] | None = None
    leads: tuple[str, ...] = ()
    gap = ""

    def __init__(self, *, as_list: bool = False) -> None:
        self._as_list = as_list

    def new_id(self, number: int, name: str) -> str:
        """As in `CallFormat`."""
        return f"call{number:05d}"

    def read(self, scan: Scan, schemas: Schemas) -> None:
        """As in `CallFormat`."""
        while (start := scan.find(_MARK, scan.position)) >= 0:
            body = scan.skip_space(start + len(_MARK))
            if scan.text.startswith("[", body) and not scan.text.startswith(_MARK, body):
                read_list(scan, start, body, _MARK, keys=ItemKeys())
            else:
                _read_named(scan, start, body)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """As in `CallFormat`."""
        if self._as_list:
            bodies = [
                {"name": call.name, "arguments": dict(call.arguments), "id": call.id}
                for call in calls
            ]
            return _MARK + write_json(bodies)
        return "".join(
            f"{_MARK}{_bare(call.name)}{_CALL_ID}{_plain_id(call)}{_ARGUMENTS}"
            + write_json(dict(call.arguments))
            for call in calls
        )


def _read_named(scan: Scan, start: int, body: int) -> None:
    """Parses one call with its name before its arguments."""
    name, call_id = None, None
    try:
        head = _HEAD.match(scan.text, body)
        if head is None:
            raise CallError(f"the call must be written as {_MARK}NAME{_ARGUMENTS}ARGUMENTS")
        name, call_id = head[1].strip(), head[2] or None
        arguments, stop = read_object(scan, scan.skip_space(head.end()), _MARK)
    except CallError as error:
        stop = scan.end_of_call(body, _MARK)
        scan.malformed(start, stop, reason=str(error), name=name, call_id=call_id)
    else:
        scan.call(start, stop, name=name, arguments=arguments, call_id=call_id)


def _plain_id(call: ToolCall) -> str:
    return writable(call.id, "[", "]", "{", "}", "\n")


def _bare(name: str) -> str:
    if name != name.strip() or not name:
        raise ValueError(f"the format cannot write the name {name!r}")
    return writable(name, "[", "]", "{", "}", "\n")
