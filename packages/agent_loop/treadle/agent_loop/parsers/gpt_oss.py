"""The harmony format of gpt-oss: a turn is a sequence of messages, each on a channel.

    <|channel|>analysis<|message|>The user asks ...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>

(in one line). A message to a recipient is a call, on any channel, unless it goes to the assistant,
as a tool's answer does that the model makes up; the others are reasoning (analysis) or content
(final, commentary). A call may also end an analysis that was never closed. Several messages on one
channel are joined by line feeds. A turn ends with <|call|> or <|return|>, which are stop tokens;
the prompt ends with <|start|>assistant.

Invariant: damaged headers, which the models sometimes write, lose no text: a message without
recipient that is not analysis is content.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from treadle.agent_loop.parsers.base import ParsedText, Settled, without_partial
from treadle.agent_loop.parsers.format_parser import counted_id, writable
from treadle.agent_loop.parsers.json_text import CallError, decode_json, json_type, write_json
from treadle.agent_loop.parsers.scan import Scan
from treadle.agent_loop.parsers.thinking import UnclosedReasoning
from treadle.agent_loop.types import ToolCall, ToolSpec

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CONSTRAIN = "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_ENDS = (_END, _CALL, _RETURN)
_SPECIAL = re.compile(r"<\|(?:start|channel|message|constrain|end|call|return)\|>")
_OURSELVES = "assistant"  # To whom a tool's own message goes, if the model writes one.
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ON_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADER_ALONE = re.compile(r"(?:<\|start\|>)?(?:assistant)?(?:<\|channel\|>\w*)?\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """The positions of a message in the text.

    Attributes:
        start: First character of the message.
        body: First character of its body.
    """

    start: int
    body: int
    stop: int
    after: int


class GptOssParser:
    """A `ToolCallParser` for harmony turns.

    Args:
        unclosed: The meaning of a call at the end of an analysis message that was never closed.
    """

    stop_tokens: tuple[str, ...] = (_CALL, _RETURN)

    def __init__(self, *, unclosed: UnclosedReasoning = UnclosedReasoning.CALL) -> None:
        self._unclosed = UnclosedReasoning(unclosed)

    def parse(
        self, text: str, *, tools: Sequence[ToolSpec] = (), prompt_end: str = ""
    ) -> ParsedText:
        """As in `ToolCallParser`."""
        scan = Scan(text, start=0, new_id=counted_id)
        thoughts: list[str] = []
        answers: list[str] = []
        start = 0
        while start < len(text):
            message = _next_message(scan, start)
            header, body = text[start : message.body], text[message.body : message.stop]
            recipient, channel = _RECIPIENT.search(header), _ON_CHANNEL.search(header)
            inner = _call_behind(scan, message)
            if recipient is not None and recipient[1] != _OURSELVES and _CHANNEL in header:
                name = recipient[1].removeprefix("functions.")
                if not _read_call(scan, message, name):
                    answers.append(text[start : message.after])
            elif channel is not None and channel[1] == "analysis":
                thoughts.append(body if inner is None else text[message.body : inner.start])
                if inner is not None and not self._read_unclosed(scan, inner):
                    answers.append(text[inner.start : inner.after])
            elif body or header.endswith(_MESSAGE):
                answers.append(body)
            elif not _HEADER_ALONE.fullmatch(header):
                answers.append(header)
            start = message.after
        content = "\n".join(answers)
        found = scan.parsed(reasoning="\n".join(thoughts))
        return replace(found, content=content.strip() if found.calls else content)

    def settled(self, text: str, *, prompt_end: str) -> Settled:
        """As in `StreamingParser`: the messages before the first call or damaged header."""
        scan = Scan(text, start=0, new_id=counted_id)
        thoughts: list[str] = []
        answers: list[str] = []
        start = 0
        while start < len(text):
            message = _next_message(scan, start)
            header, body = text[start : message.body], text[message.body : message.stop]
            if not header.endswith(_MESSAGE) or _RECIPIENT.search(header):
                break
            channel = _ON_CHANNEL.search(header)
            thought = channel is not None and channel[1] == "analysis"
            if message.after == len(text):
                body = without_partial(body.partition(_CHANNEL)[0], _START, _CHANNEL, *_ENDS)
            (thoughts if thought else answers).append(body)
            start = message.after
        return Settled("\n".join(thoughts), "\n".join(answers).rstrip())

    def _read_unclosed(self, scan: Scan, message: _Message) -> bool:
        recipient = _RECIPIENT.search(scan.text, message.start, message.body)
        assert recipient is not None, "`_call_behind` looked for it"
        name = recipient[1].removeprefix("functions.")
        if self._unclosed is UnclosedReasoning.CALL:
            return _read_call(scan, message, name)
        reason = f"the analysis before it is not closed: write {_END} before the call"
        scan.malformed(message.start, message.after, reason=reason, name=name)
        return False

    def render(self, content: str, calls: Sequence[ToolCall], *, reasoning: str = "") -> str:
        """As in `ToolCallParser`; without the token that ends the turn."""
        messages = []
        if reasoning:
            messages.append(f"{_CHANNEL}analysis{_MESSAGE}{_plain(reasoning)}{_END}")
        if calls and content:
            messages.append(f"{_CHANNEL}commentary{_MESSAGE}{_plain(content)}{_END}")
        for call in calls:
            if re.search(r"[\s<]", call.name) or not call.name:
                raise ValueError(f"the format cannot write the name {call.name!r}")
            head = f"{_CHANNEL}commentary to=functions.{call.name} {_CONSTRAIN}json{_MESSAGE}"
            body = _plain(write_json(dict(call.arguments)))
            messages.append(f"{head}{body}{_CALL}")
        if not calls:
            messages.append(f"{_CHANNEL}final{_MESSAGE}{_plain(content)}")
        return f"{_START}assistant".join(messages)


def _call_behind(scan: Scan, message: _Message) -> _Message | None:
    """Returns the call with which a message ends that is not closed before it; None if none."""
    text = scan.text
    if message.after < len(text) or text.startswith(_END, message.stop):
        return None
    start = text.rfind(_CHANNEL, message.body, message.stop)
    body = text.find(_MESSAGE, start, message.stop) + len(_MESSAGE) if start >= 0 else -1
    if body < len(_MESSAGE) or not _RECIPIENT.search(text, start, body):
        return None
    return replace(message, start=start, body=body)


def _next_message(scan: Scan, start: int) -> _Message:
    """Returns the message at `start`; without <|message|> it only has a header."""
    header = start + len(_START) if scan.text.startswith(_START, start) else start
    stop = scan.find_first(header, _START, *_ENDS)
    stop = len(scan.text) if stop < 0 else stop
    mark = scan.find(_MESSAGE, start)
    body = mark + len(_MESSAGE) if 0 <= mark < stop else stop
    end = next((len(end) for end in _ENDS if scan.text.startswith(end, stop)), 0)
    return _Message(start=start, body=body, stop=stop, after=stop + end)


def _read_call(scan: Scan, message: _Message, name: str) -> bool:
    """Parses a message as a call; returns whether it is well-formed."""
    try:
        if not scan.text.startswith(_MESSAGE, message.body - len(_MESSAGE)):
            raise CallError(f"the call has no {_MESSAGE}")
        if not name:
            raise CallError("the call has no name: write it as to=functions.NAME")
        body = scan.text[message.body : message.stop].strip()
        arguments, stop = decode_json(body)
        if stop < len(body):
            raise CallError(f"extra data after the JSON object: {body[stop:].strip()[:20]!r}")
        if not isinstance(arguments, dict):
            raise CallError(f"the arguments must be a JSON object, got {json_type(arguments)}")
    except CallError as error:
        scan.malformed(message.start, message.after, reason=str(error), name=name)
        return False
    scan.call(message.start, message.after, name=name, arguments=arguments)
    return True


def _plain(text: str) -> str:
    special = _SPECIAL.search(text)
    return writable(text, special[0]) if special else text
