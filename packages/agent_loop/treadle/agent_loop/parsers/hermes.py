"""The hermes format, of Qwen2.5 and many others: JSON between <tool_call> and </tool_call>.

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "2*3"}}
    </tool_call>

Invariant: the mark opens a call only when it is followed by a JSON object's brace or closed
later on; a mention of "<tool_call>" in prose is prose. The JSON is read as JSON, so a closing
mark inside a string does not end the call.
"""

import json
import re
from collections.abc import Sequence

from treadle.agent_loop.parsers.base import ParsedText
from treadle.agent_loop.renderer import MalformedCall
from treadle.agent_loop.types import ToolCall

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"')


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


class HermesParser:
    """Reads and writes hermes tool calls."""

    def parse(self, text: str) -> ParsedText:
        """Reads a decoded completion. Never raises."""
        calls: list[ToolCall] = []
        starts: list[int] = []
        malformed: list[MalformedCall] = []
        prose: list[str] = []
        last_close = text.rfind(_CLOSE)
        position = 0
        while (start := text.find(_OPEN, position)) >= 0:
            body = _skip_space(text, start + len(_OPEN))
            # Asked first, so that a model stuck on the opening mark costs one search, not one each.
            close = text.find(_CLOSE, body) if body <= last_close else -1
            if close < 0 and not text.startswith("{", body):
                prose.append(text[position : start + len(_OPEN)])
                position = start + len(_OPEN)
                continue
            prose.append(text[position:start])
            try:
                call, position = _read_call(text, body, call_id=f"call_{len(calls)}")
            except (ValueError, RecursionError) as error:
                position = len(text) if close < 0 else close + len(_CLOSE)
                bad = _malformed(text, start, position, error)
                malformed.append(bad)
                prose.append(bad.text)
            else:
                calls.append(call)
                starts.append(start)
        prose.append(text[position:])
        return ParsedText(
            content="".join(prose).strip() if calls else text,
            calls=tuple(calls),
            call_starts=tuple(starts),
            malformed=tuple(malformed),
        )

    def render(self, content: str, calls: Sequence[ToolCall]) -> str:
        """Writes a text with calls."""
        blocks = [content] if content else []
        for call in calls:
            body = {"name": call.name, "arguments": dict(call.arguments)}
            blocks.append(f"{_OPEN}\n{json.dumps(body, ensure_ascii=False)}\n{_CLOSE}")
        return "\n".join(blocks)


def _read_call(text: str, body: int, *, call_id: str) -> tuple[ToolCall, int]:
    """Reads the JSON at `body` and its closing mark; returns the call and the place after it."""
    value, end = _DECODER.raw_decode(text, body)
    end = _skip_space(text, end)
    if not text.startswith(_CLOSE, end):
        raise ValueError(
            f"extra data after the JSON object: {text[end : end + 20]!r}"
            if end < len(text)
            else f"the call is not closed by {_CLOSE}"
        )
    if not isinstance(value, dict):
        raise ValueError(f"the call must be a JSON object, got {_json_type(value)}")
    for key in ("name", "arguments"):
        if key not in value:
            raise ValueError(f"the call has no {key!r}")
    name, arguments = value["name"], value["arguments"]
    if not isinstance(name, str) or not name:
        raise ValueError(f"'name' must be a text, got {_json_type(name)}")
    if not isinstance(arguments, dict):
        raise ValueError(f"'arguments' must be a JSON object, got {_json_type(arguments)}")
    # "\ud800" and 1e999 are read as JSON, but could not be rendered or written as JSON again.
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return ToolCall(id=call_id, name=name, arguments=arguments), end + len(_CLOSE)


def _malformed(
    text: str, start: int, stop: int, error: ValueError | RecursionError
) -> MalformedCall:
    span = text[start:stop]
    if isinstance(error, json.JSONDecodeError):
        reason = f"{error.msg} at character {error.pos - start - len(_OPEN)} of the call"
    elif isinstance(error, RecursionError):
        reason = "the JSON is nested too deeply"
    else:
        reason = str(error)
    name = _NAME.search(span)
    return MalformedCall(
        text=span, start=start, stop=stop, reason=reason, name=name[1] if name else None
    )


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


def _json_type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"
