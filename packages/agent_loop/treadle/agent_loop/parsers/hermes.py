"""The hermes format, of Qwen2.5, Qwen3 and many others: JSON between <tool_call> and </tool_call>.

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "2*3"}}
    </tool_call>

Invariant: the mark opens a call only if the brace of a JSON object follows it, or if it is closed
before the next one; a mention of "<tool_call>" in prose is prose. The JSON is parsed as JSON, so a
closing mark inside a string does not end the call.
"""

import re
from collections.abc import Sequence

from treadle.agent_loop.parsers.format_parser import FormatParser, counted_id
from treadle.agent_loop.parsers.json_text import CallError, read_call, read_json, write_json
from treadle.agent_loop.parsers.scan import Scan
from treadle.agent_loop.parsers.schema_values import Schemas
from treadle.agent_loop.parsers.thinking import Thinking, UnclosedReasoning
from treadle.agent_loop.tokens.renderer import CallFrame
from treadle.agent_loop.types import ToolCall

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"')


class HermesFormat:
    """Hermes tool calls."""

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
            body = scan.skip_space(start + len(_OPEN))
            if not (scan.text.startswith("{", body) or scan.is_closed(body, _OPEN, _CLOSE)):
                place = start + len(_OPEN)
                continue
            try:
                value, stop = read_json(scan, body, _CLOSE, _OPEN)
                place = scan.after(_CLOSE, stop)
                if place < 0:
                    raise CallError(_after_the_json(scan, stop))
                name, arguments = read_call(value)
            except CallError as error:
                place = scan.end_of_call(body, _OPEN, close=_CLOSE)
                named = named_in(scan.text[start:place])
                scan.malformed(start, place, reason=str(error), name=named)
            else:
                scan.call(start, place, name=name, arguments=arguments)

    def frame(self, name: str) -> CallFrame:
        """As in `FramedFormat`; what `write` writes."""
        begin = f'{_OPEN}\n{{"name": {write_json(name)}, "arguments": '
        return CallFrame(trigger=_OPEN, begin=begin, end=f"}}\n{_CLOSE}")

    def write(self, calls: Sequence[ToolCall]) -> str:
        """As in `CallFormat`."""
        bodies = ({"name": call.name, "arguments": dict(call.arguments)} for call in calls)
        return "\n".join(f"{_OPEN}\n{write_json(body)}\n{_CLOSE}" for body in bodies)


class HermesParser(FormatParser):
    """The parser "hermes": hermes tool calls; reasoning stays in the content."""

    def __init__(self, *, unclosed: UnclosedReasoning = UnclosedReasoning.CALL) -> None:
        super().__init__(HermesFormat(), thinking=Thinking(), separates=False, unclosed=unclosed)


def named_in(span: str) -> str | None:
    """Returns the name in a JSON call, None if it cannot be found."""
    name = _NAME.search(span)
    return name[1] if name else None


def _after_the_json(scan: Scan, stop: int) -> str:
    stop = scan.skip_space(stop)
    if stop < len(scan.text):
        return f"extra data after the JSON object: {scan.text[stop : stop + 20]!r}"
    return f"the call is not closed by {_CLOSE}"
