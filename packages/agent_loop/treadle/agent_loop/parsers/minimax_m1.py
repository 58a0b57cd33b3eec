"""The format of MiniMax-M1: one JSON object per line, in <tool_calls>.

    <tool_calls>
    {"name": "get_weather", "arguments": {"city": "Rome"}}
    </tool_calls>

Invariant: each line is parsed separately, so a malformed call does not affect the others. The
block's end may be missing. A mark opens a block only if the brace of an object follows it, or if it
is closed before the next one.
"""

from collections.abc import Sequence

from treadle.agent_loop.parsers.format_parser import counted_id
from treadle.agent_loop.parsers.hermes import named_in
from treadle.agent_loop.parsers.json_text import CallError, read_call, read_json, write_json
from treadle.agent_loop.parsers.scan import Scan
from treadle.agent_loop.parsers.schema_values import Schemas
from treadle.agent_loop.types import ToolCall

_OPEN, _CLOSE = "<tool_calls>", "</tool_calls>"


class MinimaxM1Format:
    """MiniMax-M1 tool calls."""

    stop_tokens: tuple[str, ...] = ()
    marks: tuple[str, ...] = (_OPEN,)
    element: tuple[str, str] | None = (_OPEN, _CLOSE)
    leads: tuple[str, ...] = ()
    gap = "\n"

    def new_id(self, number: int, name: str) -> str:
        """As in `CallFormat`."""
        return counted_id(number, name)

    def read(self, scan: Scan, schemas: Schemas) -> None:
        """As in `CallFormat`."""
        place = scan.position
        while (start := scan.find(_OPEN, place)) >= 0:
            place = start + len(_OPEN)
            opened = scan.text.startswith("{", scan.skip_space(place))
            if opened or scan.is_closed(place, _OPEN, _CLOSE):
                place = _read_block(scan, start, place)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """As in `CallFormat`."""
        bodies = ({"name": call.name, "arguments": dict(call.arguments)} for call in calls)
        return "\n".join([_OPEN, *map(write_json, bodies), _CLOSE])


def _read_block(scan: Scan, start: int, place: int) -> int:
    """Parses the calls of one block; returns the position after it."""
    scan.mark(start, scan.skip_space(place))
    while scan.position < len(scan.text):
        start = scan.position
        if (stop := scan.after(_CLOSE, start)) >= 0:
            scan.mark(start, stop)
            return stop
        try:
            value, stop = read_json(scan, start, "\n", _CLOSE, _OPEN)
            if scan.after(_CLOSE, stop) < 0 and scan.text[stop : stop + 1] not in ("", "\n"):
                found = scan.text[stop : stop + 20]
                raise CallError(f"extra data after the JSON object of a call: {found!r}")
            name, arguments = read_call(value)
        except CallError as error:
            stop = scan.end_of_call(start + 1, "\n", _CLOSE, _OPEN)
            named = named_in(scan.text[start:stop])
            scan.malformed(start, stop, reason=str(error), name=named)
            if scan.text.startswith(_OPEN, stop):
                return stop
        else:
            scan.call(start, stop, name=name, arguments=arguments)
        scan.mark(stop, scan.skip_space(stop))
    return scan.position
