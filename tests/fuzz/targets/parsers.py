"""The parsers of tool calls: the head is a parser's name, the body the text of a completion."""

import json
import sys
import time
from itertools import pairwise
from types import FrameType
from typing import Any

from fuzz.inputs import Input
from fuzz.target import Fell, Target

from treadle.agent_loop.parsers import PARSER_NAMES, ParsedText, ToolCallParser, parser_named
from treadle.agent_loop.parsers.testing import SAMPLES, TOOL

_LONG, _LONGEST = 1500, 6000
"""Characters; enough to tell twice the work from four times."""
_FIXED = 10_000
"""Work that does not grow with the text, generously."""
_MEASURABLE_S = 0.1


class ParsersTarget(Target):
    """All parsers of tool calls."""

    promises = (
        "No exception. Ids are unique; spans are in order and say what the text says; arguments "
        "can be written as JSON. What was read from a text and can be rendered is read from that "
        "again. The work, in calls, characters and time, grows "
        "with the text and not with its square."
    )
    form = "text"
    heads = PARSER_NAMES
    words = tuple(
        word.encode()
        for word in sorted(
            {
                *(
                    "<tool_call>",
                    "</tool_call>",
                    "<think>",
                    "</think>",
                    "<function=",
                    "</function>",
                ),
                *("<parameter=", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>"),
                *(
                    "</arg_value>",
                    "[TOOL_CALLS]",
                    "[ARGS]",
                    "[CALL_ID]",
                    '<invoke name="',
                    "</invoke>",
                ),
                *('<parameter name="', "<minimax:tool_call>", "</minimax:tool_call>"),
                *(
                    "<|channel|>",
                    "<|message|>",
                    "<|start|>",
                    "<|end|>",
                    "<|call|>",
                    " to=functions.",
                ),
                *(
                    "<|open|>",
                    "<|close|>",
                    "<|sep|>",
                    "call tool=",
                    'argument key="',
                    "<|python_tag|>",
                ),
                *("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
                *("<|tool_calls_section_begin|>", "functions.", ":0", "<|constrain|>json"),
                *("{", "}", "[", "]", '"', "\\", "\\ud800", "1e999", "NaN", "null", ":", ",", "\n"),
                *(
                    '{"name": "get_weather", "arguments": {',
                    '"parameters"',
                    "`" * 3,
                    "\x00",
                    "\u2028",
                ),
                *(sample.first for sample in SAMPLES),
                *(sample.prompt_end for sample in SAMPLES),
            }
        )
    )

    def check(self, parts: Input) -> None:
        for part in parts:
            if part.head in PARSER_NAMES:
                parser, text = parser_named(part.head), part.body.decode(errors="replace")
                parsed = _parse(parser, text)
                _check_parsed(text, parsed)
                if not parsed.malformed and parsed.calls:
                    _check_round_trip(parser, parsed)
                check_work(parser, text)


def _parse(parser: ToolCallParser, text: str) -> ParsedText:
    try:
        return parser.parse(text, tools=(TOOL,))
    except Exception as error:
        raise Fell(f"{type(error).__name__}: {error}") from error


def _check_parsed(text: str, parsed: ParsedText) -> None:
    ids = [*(call.id for call in parsed.calls), *(call.id for call in parsed.malformed)]
    if len(set(ids)) != len(ids):
        raise Fell(f"ids are not unique: {ids}")
    starts = parsed.call_starts
    if len(starts) != len(parsed.calls) or any(a >= b for a, b in pairwise(starts)):
        raise Fell(f"{len(parsed.calls)} calls begin at {starts}")
    if starts and not 0 <= starts[0] <= starts[-1] < len(text):
        raise Fell(f"calls begin at {starts} in a text of {len(text)}")
    for malformed in parsed.malformed:
        if text[malformed.start : malformed.stop] != malformed.text or not malformed.reason:
            raise Fell(f"a malformed call is not what the text says: {malformed}")
    for call in parsed.calls:
        try:
            json.dumps(dict(call.arguments), ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise Fell(f"arguments are not JSON: {error}: {call}") from error
        if not call.name:
            raise Fell(f"a call without a name: {call}")


def _check_round_trip(parser: ToolCallParser, parsed: ParsedText) -> None:
    try:
        text = parser.render(parsed.content, parsed.calls, reasoning=parsed.reasoning or "")
    except ValueError:
        return
    again = _parse(parser, text)
    before = [(call.name, call.arguments) for call in parsed.calls]
    after = [(call.name, call.arguments) for call in again.calls]
    if before != after:
        raise Fell(f"read: {before}; rendered as {text!r}, and read from that: {after}")


def check_work(parser: ToolCallParser, text: str) -> None:
    """Checks that the work of reading a text grows with it, and not with its square.

    Raises:
        Fell: It does not.
    """
    text = text[:_LONGEST]
    if not text:
        return
    long = text * max(1, _LONG // len(text))
    one, two, four = (_work(parser, long * copies) for copies in (1, 2, 4))
    # Growth, because the first copy may be read otherwise, as reasoning. If the work is linear, the
    # second is twice the first; if it is quadratic, four times.
    if four - two > 3 * (two - one) + _FIXED:
        raise Fell(f"{len(long)} characters are {one} of work; 2 and 4 times as many {two}, {four}")
    # What regular expressions do cannot be counted. This thread's time does not grow with the load
    # of the machine; linear work takes 16 times as long, quadratic work 256 times.
    once, often = (_cpu_s(parser, long * copies) for copies in (1, 16))
    if often > max(64 * once, _MEASURABLE_S):
        raise Fell(f"{len(long)} characters take {once:.2g} s, 16 times as many {often:.2g} s")


def _cpu_s(parser: ToolCallParser, text: str) -> float:
    began = time.thread_time()
    parser.parse(text, tools=(TOOL,))
    return time.thread_time() - began


def _work(parser: ToolCallParser, text: str) -> int:
    """Calls of functions, in Python and C, and the characters that are searched or copied."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += 1

    counted = _CountedText(text)
    _CountedText.characters = 0
    sys.setprofile(count)
    try:
        parser.parse(counted, tools=(TOOL,))
    except Exception as error:
        raise Fell(f"{type(error).__name__}: {error}") from error
    finally:
        sys.setprofile(None)
    return calls + _CountedText.characters


class _CountedText(str):
    """A text that counts what is searched in it, and copied out of it."""

    characters = 0
    __slots__ = ()

    def find(self, sub: str, start: Any = 0, stop: Any = None) -> int:
        found = super().find(sub, start, stop)
        _CountedText.characters += max(0, (len(self) if found < 0 else found) - start)
        return found

    def __getitem__(self, key: Any) -> str:
        piece = super().__getitem__(key)
        _CountedText.characters += len(piece)
        return piece
