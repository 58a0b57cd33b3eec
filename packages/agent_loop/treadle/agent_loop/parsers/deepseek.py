"""The format of DeepSeek V3, R1 and V3.1: JSON arguments between special tokens.

V3.1 writes name and arguments, V3 and R1 the type of call, the name and fenced arguments:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>...
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>f
    ```json
    {"a": 1}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Both are parsed; V3.1's is written. Invariant: each call is parsed separately, and the marks around
all of them may be missing.
"""  # noqa: RUF002 - the bars are the model's

import re
from collections.abc import Sequence

from treadle.agent_loop.parsers.format_parser import counted_id, writable
from treadle.agent_loop.parsers.json_text import CallError, read_object, write_json
from treadle.agent_loop.parsers.scan import Scan
from treadle.agent_loop.parsers.schema_values import Schemas
from treadle.agent_loop.types import ToolCall

# ruff: noqa: RUF001 - the bars are the model's
_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_MARKS = (_CALL_END, _CALL, _SECTION_END)
_SEPARATOR = "<｜tool▁sep｜>"
_HEAD = re.compile(f"([^<>\n]*){_SEPARATOR}")
_FENCED = re.compile(r"([^<>{}\n]+)\n```(?:json)?\n")
_FENCE = "```"


class DeepSeekFormat:
    """DeepSeek V3.1 tool calls, and those of V3 and R1."""

    stop_tokens: tuple[str, ...] = ()
    marks: tuple[str, ...] = (_CALL, _SECTION, _SECTION_END)
    element: tuple[str, str] | None = ("<｜tool▁(calls?)▁begin｜>", r"<｜tool▁\1▁end｜>")
    leads: tuple[str, ...] = ()
    gap = ""

    def new_id(self, number: int, name: str) -> str:
        """As in `CallFormat`."""
        return counted_id(number, name)

    def read(self, scan: Scan, schemas: Schemas) -> None:
        """As in `CallFormat`."""
        for start in scan.call_starts(_CALL, _SECTION, _SECTION_END):
            _read_call(scan, start)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """As in `CallFormat`."""
        bodies = "".join(
            f"{_CALL}{_bare(call.name)}{_SEPARATOR}{write_json(dict(call.arguments))}{_CALL_END}"
            for call in calls
        )
        return f"{_SECTION}{bodies}{_SECTION_END}"


def _read_call(scan: Scan, start: int) -> None:
    """Parses one call of either kind, and the white space after it."""
    body, name = start + len(_CALL), None
    try:
        head = _HEAD.match(scan.text, body)
        if head is None:
            raise CallError(f"the call must be written as NAME{_SEPARATOR}ARGUMENTS")
        name, place = head[1].strip(), scan.skip_space(head.end())
        fenced = _FENCED.match(scan.text, place)
        if fenced is not None:
            name, place = fenced[1].strip(), scan.skip_space(fenced.end())
        if not name:
            raise CallError(f"the call has no name: write it before {_SEPARATOR}")
        arguments, place = read_object(scan, place, *_MARKS)
        if fenced is not None:
            place = max(place, scan.after(_FENCE, place))
        stop = scan.after(_CALL_END, place)
        if stop < 0:
            raise CallError(f"the arguments are not followed by {_CALL_END}")
    except CallError as error:
        stop = scan.end_of_call(body, _CALL, _SECTION_END, close=_CALL_END)
        scan.malformed(start, stop, reason=str(error), name=name)
    else:
        scan.call(start, stop, name=name, arguments=arguments)
    scan.mark(stop, scan.skip_space(stop))


def _bare(name: str) -> str:
    if name != name.strip() or not name:
        raise ValueError(f"the format cannot write the name {name!r}")
    return writable(name, "<", ">", "\n")
