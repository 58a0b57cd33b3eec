"""The format of Llama 3.1 to 3.3: the turn is a JSON object with name and parameters.

    {"name": "get_weather", "parameters": {"city": "Rome"}}

After `<|python_tag|>`, a call may also follow a text. Several calls are separated by semicolons or
white space. Invariant: without the tag, only a turn that begins with a JSON object has calls, and
an object without the shape of a call is an answer. After the tag everything is meant as calls; the
model's built-in ones (`brave_search.call(...)`) are malformed.
"""

import re
from collections.abc import Sequence

from treadle.agent_loop.parsers.format_parser import counted_id
from treadle.agent_loop.parsers.hermes import named_in
from treadle.agent_loop.parsers.json_text import CallError, read_call, read_json, write_json
from treadle.agent_loop.parsers.scan import Scan
from treadle.agent_loop.parsers.schema_values import Schemas
from treadle.agent_loop.types import ToolCall

_TAG = "<|python_tag|>"
_KEYS = ("parameters", "arguments")
_LIKE_A_CALL = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:')


class Llama3JsonFormat:
    """Llama 3 tool calls."""

    stop_tokens: tuple[str, ...] = ("<|eom_id|>",)
    marks: tuple[str, ...] = (_TAG,)
    element: tuple[str, str] | None = None
    leads: tuple[str, ...] = ("{",)
    gap = _TAG

    def new_id(self, number: int, name: str) -> str:
        """As in `CallFormat`."""
        return counted_id(number, name)

    def read(self, scan: Scan, schemas: Schemas) -> None:
        """As in `CallFormat`."""
        start = scan.skip_space(scan.position)
        _read_calls(scan, start, start, meant=False)
        while (start := scan.find(_TAG, scan.position)) >= 0:
            _read_calls(scan, start, scan.skip_space(start + len(_TAG)), meant=True)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """As in `CallFormat`."""
        bodies = ({"name": call.name, "parameters": dict(call.arguments)} for call in calls)
        return "; ".join(map(write_json, bodies))


def _read_calls(scan: Scan, start: int, place: int, *, meant: bool) -> None:
    """Parses calls up to the first text that is not a call.

    Args:
        start: Position of the first call, including its tag.
        place: Position of the first call's JSON.
        meant: Whether text that is not a call counts as a malformed call.
    """
    while meant or scan.text.startswith("{", place):
        value: object = None
        try:
            if not scan.text.startswith("{", place):
                found = scan.text[place : place + 20]
                raise CallError(f'expected {{"name": ..., "parameters": {{...}}}}, got {found!r}')
            value, stop = read_json(scan, place, _TAG)
            name, arguments = read_call(value, arguments=_KEYS)
        except CallError as error:
            if meant or _is_like_a_call(scan, place, value):
                stop = scan.end_of_call(place, _TAG)
                named = named_in(scan.text[start:stop])
                scan.malformed(start, stop, reason=str(error), name=named)
            return
        scan.call(start, stop, name=name, arguments=arguments)
        start = place = scan.skip_space(stop)
        meant = scan.text.startswith(";", place)
        if meant:
            start = place = scan.skip_space(place + 1)
            scan.mark(stop, place)
            meant = place < len(scan.text)


def _is_like_a_call(scan: Scan, start: int, value: object) -> bool:
    """Returns whether an object at the beginning of a turn was meant as a call."""
    if isinstance(value, dict):
        return "name" in value and any(key in value for key in _KEYS)
    return value is None and _LIKE_A_CALL.match(scan.text, start) is not None
