"""The formats of Mistral's models: JSON after [TOOL_CALLS].

Up to Nemo all calls are one JSON list; later models write one mark, name and arguments per call,
some with an id:

    [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "call00000"}]
    [TOOL_CALLS]f[ARGS]{"a": 1}
    [TOOL_CALLS]f[CALL_ID]call00000[ARGS]{"a": 1}

All are read; the third is written, or the first with `as_list`. Invariant: every id, also of a
call that cannot be read, is of nine letters or digits, because the templates refuse all others.
Reasoning (`[THINK]...[/THINK]`) is content, since that is where the templates want it.
"""

import re
from collections.abc import Sequence

from treadle.agent_loop.parsers.format_parser import writable
from treadle.agent_loop.parsers.json_text import (
    CallError,
    decode_json,
    read_call,
    read_json,
    read_object,
    write_json,
)
from treadle.agent_loop.parsers.scan import Scan
from treadle.agent_loop.parsers.schema_values import Schemas
from treadle.agent_loop.types import ToolCall

_MARK = "[TOOL_CALLS]"
_CALL_ID, _ARGUMENTS = "[CALL_ID]", "[ARGS]"
_HEAD = re.compile(r"([^\[\]{}\n]+)(?:\[CALL_ID\]([^\[\]{}\n]*))?\[ARGS\]")
_ID = re.compile(r"[A-Za-z0-9]{9}")


class MistralFormat:
    """Mistral tool calls.

    Args:
        as_list: Write the older kind.
    """

    stop_tokens: tuple[str, ...] = ()
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
                _read_list(scan, start, body)
            else:
                _read_named(scan, start, body)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """As in `CallFormat`."""
        if self._as_list:
            bodies = [
                {"name": call.name, "arguments": dict(call.arguments), "id": _own_id(call)}
                for call in calls
            ]
            return _MARK + write_json(bodies)
        return "".join(
            f"{_MARK}{_bare(call.name)}{_CALL_ID}{_own_id(call)}{_ARGUMENTS}"
            + write_json(dict(call.arguments))
            for call in calls
        )


def _read_named(scan: Scan, start: int, body: int) -> None:
    """Reads one call, with its name before its arguments."""
    name, call_id = None, None
    try:
        head = _HEAD.match(scan.text, body)
        if head is None:
            raise CallError(f"the call must be written as {_MARK}NAME{_ARGUMENTS}ARGUMENTS")
        name, call_id = head[1].strip(), _checked_id(head[2])
        arguments, stop = read_object(scan, scan.skip_space(head.end()), before=_MARK)
    except CallError as error:
        stop = scan.end_of_call(body, _MARK, _MARK)
        scan.malformed(start, stop, reason=str(error), name=name, call_id=call_id)
    else:
        scan.call(start, stop, name=name, arguments=arguments, call_id=call_id)


def _read_list(scan: Scan, start: int, body: int) -> None:
    """Reads calls that are one JSON list; each is a span of its own."""
    try:
        items, end = read_json(scan, body, before=_MARK)
    except CallError as error:
        stop = scan.end_of_call(body, _MARK, _MARK)
        scan.malformed(start, stop, reason=str(error))
        return
    assert isinstance(items, list)
    scan.mark(start, body + 1)
    text = scan.text[body:end]
    place = 1
    for item in items:
        place = _item_start(text, place)
        _, stop = decode_json(text, place)
        try:
            name, arguments = read_call(item)
            call_id = _checked_id(item.get("id"))
        except CallError as error:
            named = item.get("name") if isinstance(item, dict) else None
            known = named if isinstance(named, str) else None
            scan.malformed(body + place, body + stop, reason=str(error), name=known)
        else:
            scan.call(body + place, body + stop, name=name, arguments=arguments, call_id=call_id)
        place = stop
    scan.mark(scan.position, end)


def _item_start(text: str, place: int) -> int:
    while text[place] in ", \t\r\n":
        place += 1
    return place


def _checked_id(given: object) -> str | None:
    """The id that the model wrote; None when it wrote none."""
    if given is None:
        return None
    if not isinstance(given, str) or not _ID.fullmatch(given):
        raise CallError(f"the id must be 9 letters or digits, got {given!r:.40}")
    return given


def _own_id(call: ToolCall) -> str:
    if not _ID.fullmatch(call.id):
        raise ValueError(f"the id of a call must be 9 letters or digits, got {call.id!r}")
    return call.id


def _bare(name: str) -> str:
    if name != name.strip() or not name:
        raise ValueError(f"the format cannot write the name {name!r}")
    return writable(name, "[", "]", "{", "}", "\n")
