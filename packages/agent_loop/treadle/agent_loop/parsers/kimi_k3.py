"""The format of Kimi K3: elements written with special tokens, whose arguments state their type.

    <|open|>think<|sep|>...<|close|>think<|sep|><|open|>response<|sep|>...<|close|>response<|sep|>
    <|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>
    <|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>

(in one line). The prompt opens `think` or `response`. Invariant: each call is parsed separately;
the elements around answer and calls are not content, and may be missing.
"""

import re
from collections.abc import Sequence

from treadle.agent_loop.parsers.format_parser import counted_id, writable
from treadle.agent_loop.parsers.json_text import CallError, read_value, write_json
from treadle.agent_loop.parsers.scan import Scan
from treadle.agent_loop.parsers.schema_values import Schemas
from treadle.agent_loop.types import ToolCall

_FRAMES = tuple(
    f"<|{side}|>{name}<|sep|>"
    for name in ("response", "tools", "message")
    for side in ("open", "close")
)
_CALL, _CALL_END = "<|open|>call ", "<|close|>call<|sep|>"
_ARGUMENT, _ARGUMENT_END = "<|open|>argument ", "<|close|>argument<|sep|>"
_JSON, _JSON_END = '<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"
_CALL_HEAD = re.compile(r'<\|open\|>call tool="([^"<>]+)"(?: index="\d*")?<\|sep\|>')
_ARGUMENT_HEAD = re.compile(r'<\|open\|>argument key="([^"<>]*)" type="(\w+)"<\|sep\|>')


class KimiK3Format:
    """Kimi K3 tool calls."""

    stop_tokens: tuple[str, ...] = ()
    marks: tuple[str, ...] = (_CALL, *_FRAMES)
    element: tuple[str, str] | None = (r"<\|open\|>(\w+)[^<]*<\|sep\|>", r"<|close|>\1<|sep|>")
    leads: tuple[str, ...] = ()
    gap = _FRAMES[1]

    def new_id(self, number: int, name: str) -> str:
        """As in `CallFormat`."""
        return counted_id(number, name)

    def read(self, scan: Scan, schemas: Schemas) -> None:
        """As in `CallFormat`."""
        while (start := scan.find_first(scan.position, _CALL, *_FRAMES)) >= 0:
            for frame in _FRAMES:
                if scan.text.startswith(frame, start):
                    scan.frame(start, start + len(frame))
                    break
            else:
                _read_call(scan, start)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """As in `CallFormat`."""
        bodies = (_write_call(call, index) for index, call in enumerate(calls, start=1))
        return "".join(["<|open|>tools<|sep|>", *bodies, "<|close|>tools<|sep|>"])


def _read_call(scan: Scan, start: int) -> None:
    head = _CALL_HEAD.match(scan.text, start)
    name = _unescaped(head[1]) if head is not None else None
    try:
        if head is None:
            raise CallError(f'the call must begin with {_CALL}tool="NAME" index="NUMBER"<|sep|>')
        arguments, stop = _read_arguments(scan, head.end())
    except CallError as error:
        body = start + len(_CALL)
        stop = scan.end_of_call(body, _CALL, *_FRAMES, close=_CALL_END)
        scan.malformed(start, stop, reason=str(error), name=name)
    else:
        scan.call(start, stop, name=name or "", arguments=arguments)


def _read_arguments(scan: Scan, place: int) -> tuple[dict[str, object], int]:
    """Parses separate arguments or one block; returns them and the position after the call."""
    arguments: dict[str, object] = {}
    while (stop := scan.after(_CALL_END, place)) < 0:
        place = scan.skip_space(place)
        block = scan.text.startswith(_JSON, place)
        head = _ARGUMENT_HEAD.match(scan.text, place)
        if head is None and not block:
            found = scan.text[place : place + 40]
            raise CallError(
                f'expected {_ARGUMENT}key="NAME" type="TYPE"<|sep|> or {_CALL_END}, got {found!r}'
                if found
                else f"the call is not closed by {_CALL_END}"
            )
        begin, close = (head.end(), _ARGUMENT_END) if head else (place + len(_JSON), _JSON_END)
        end = scan.find(close, begin)
        if end < 0 or 0 <= scan.find_first(begin, _CALL, _ARGUMENT) < end:
            raise CallError(f"an argument is not closed by {close}")
        text = scan.text[begin:end]
        given = {_unescaped(head[1]): _value(text, head[2])} if head else _value(text, "object")
        if not isinstance(given, dict) or given.keys() & arguments.keys():
            raise CallError("an argument is given twice, or all of them together are not an object")
        arguments.update(given)
        place = end + len(close)
    return arguments, stop


def _value(text: str, kind: str) -> object:
    if kind == "string":
        return text
    try:
        return read_value(text)
    except CallError as error:
        raise CallError(f'an argument has type="{kind}", and {error}') from None


def _write_call(call: ToolCall, index: int) -> str:
    parts = [f'<|open|>call tool="{_attribute(call.name)}" index="{index}"<|sep|>']
    for key, value in call.arguments.items():
        is_text = isinstance(value, str)
        text = value if isinstance(value, str) else write_json(value)
        kind = "string" if is_text else _kind(value)
        parts.append(f'<|open|>argument key="{_attribute(key)}" type="{kind}"<|sep|>')
        parts.append(writable(text, "<|open|>", "<|close|>") + _ARGUMENT_END)
    return "".join([*parts, _CALL_END])


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case list():
            return "array"
        case _:
            return "object"


def _attribute(text: str) -> str:
    if not text:
        raise ValueError("the format cannot write an empty name")
    return writable(text, "<", ">").replace("&", "&amp;").replace('"', "&quot;")


def _unescaped(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")
