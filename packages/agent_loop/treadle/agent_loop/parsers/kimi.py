"""The format of Kimi K2: JSON arguments between special tokens, after an id that names the tool.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0
    <|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>

(in one line). Invariant: the id is kept as the model wrote it, because the templates use it in the
answer, where only the id tells the model which tool answered. An id is functions.NAME:NUMBER; newer
checkpoints write others: then the call is of the shown tool whose name the id holds, the longest of
them, or of the only one whose keys the arguments fit. Each call is parsed separately; the marks
around all of them may be missing, or in the singular, as the models sometimes write them.
"""

import re
from collections.abc import Iterable, Sequence

from treadle.agent_loop.parsers.format_parser import writable
from treadle.agent_loop.parsers.json_text import CallError, read_object, write_json
from treadle.agent_loop.parsers.scan import Scan
from treadle.agent_loop.parsers.schema_values import Schemas
from treadle.agent_loop.types import ToolCall

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_SECTIONS = (
    _SECTION,
    _SECTION_END,
    "<|tool_call_section_begin|>",
    "<|tool_call_section_end|>",
)
_CALL, _CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_MARKS = (_CALL_END, _CALL, *_SECTIONS)
_ARGUMENTS = "<|tool_call_argument_begin|>"
_HEAD = re.compile(r"[^<\n]*")
_ID = re.compile(r"(?:functions\.)?([^:\s]+):\d+")


class KimiFormat:
    """Kimi K2 tool calls."""

    stop_tokens: tuple[str, ...] = ()
    marks: tuple[str, ...] = (_CALL, *_SECTIONS)
    element: tuple[str, str] | None = (
        r"<\|(tool_call|tool_calls?_section)_begin\|>",
        r"<|\1_end|>",
    )
    leads: tuple[str, ...] = ()
    gap = ""

    def new_id(self, number: int, name: str) -> str:
        """As in `CallFormat`: the id that the templates would write."""
        return f"functions.{name}:{number}"

    def read(self, scan: Scan, schemas: Schemas) -> None:
        """As in `CallFormat`."""
        for start in scan.call_starts(_CALL, *_SECTIONS):
            _read_call(scan, start, schemas)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """As in `CallFormat`; an id that does not name its tool cannot be written."""
        bodies = "".join(
            f"{_CALL}{_own_id(call)}{_ARGUMENTS}{write_json(dict(call.arguments))}{_CALL_END}"
            for call in calls
        )
        return f"{_SECTION}{bodies}{_SECTION_END}"


def _read_call(scan: Scan, start: int, schemas: Schemas) -> None:
    """Parses one call, and the white space after it."""
    body = start + len(_CALL)
    head = _HEAD.match(scan.text, scan.skip_space(body))
    assert head is not None
    call_id = head[0].strip()
    name = _name_in(call_id, schemas.tools)
    try:
        place = scan.after(_ARGUMENTS, head.end())
        if place < 0:
            raise CallError(
                f"the id is not followed by {_ARGUMENTS}" if name else _of_no_tool(call_id)
            )
        arguments, place = read_object(scan, scan.skip_space(place), *_MARKS)
        if name is None and (name := schemas.fitting(arguments)) is None:
            raise CallError(_of_no_tool(call_id))
        stop = scan.after(_CALL_END, place)
        if stop < 0:
            raise CallError(f"the arguments are not followed by {_CALL_END}")
    except CallError as error:
        stop = scan.end_of_call(body, _CALL, *_SECTIONS, close=_CALL_END)
        scan.malformed(start, stop, reason=str(error), name=name, call_id=call_id or None)
    else:
        scan.call(start, stop, name=name, arguments=arguments, call_id=call_id)
    scan.mark(stop, scan.skip_space(stop))


def _of_no_tool(call_id: str) -> str:
    return f"the id must be functions.NAME:NUMBER, got {call_id!r:.80}"


def _name_in(call_id: str, tools: Iterable[str]) -> str | None:
    """Returns the tool that an id names; None if it names none."""
    if named := _ID.fullmatch(call_id):
        return named[1]
    held = (tool for tool in tools if re.search(rf"(?<!\w){re.escape(tool)}(?!\w)", call_id))
    return max(held, key=len, default=None)


def _own_id(call: ToolCall) -> str:
    if _name_in(call.id, (call.name,)) != call.name:
        raise ValueError(f"the id of a call of {call.name!r} must be functions.{call.name}:NUMBER")
    return writable(call.id, "<", "\n")
