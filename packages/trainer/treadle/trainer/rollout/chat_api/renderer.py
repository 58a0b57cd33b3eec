"""The chat format of an address that takes messages: ids that stand for messages.

A message is [its JSON, three bytes of UTF-8 an id] [END]. A reply is [its own id] and one [PAD] for
each further token that the address counted, so that a reply has the length that it cost. Prompts
and tool results have estimated lengths: three bytes a token.

Invariant: `requests` reads from the ids of a conversation exactly the messages that were rendered
and the replies that were sampled.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from treadle.agent_loop import (
    Image,
    MalformedCall,
    Message,
    ParsedCompletion,
    PlacedImage,
    Rendering,
    ToolCall,
    ToolSpec,
)

__all__ = ["ApiRenderer", "Reply"]

_END, _PAD, _IMAGE = range(3)
_BYTES_PER_ID = 3
_FIRST_REPLY = 4 << 24  # above every id of bytes
_MAX_DEPTH = 100  # of arguments; what handles them may recurse
_EMPTY = ParsedCompletion(message=Message(role="assistant", content=""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One reply of the address.

    Attributes:
        content: Its text, without calls and reasoning.
        reasoning: The reasoning that the address separated; None: it separates none.
        calls: The calls, each with its name and its arguments as the model wrote them.
        num_tokens: Number of sampled tokens that the address counted, at least 1.
    """

    content: str
    reasoning: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    num_tokens: int = 1


@dataclass(frozen=True, slots=True)
class _Written:
    """A reply as text, as a message of loops and as a message of the address."""

    text: str
    parsed: ParsedCompletion
    sent: Mapping[str, object]
    num_tokens: int


class ApiRenderer:
    """Writes messages as ids, and reads messages from ids."""

    stop_token_ids: ClassVar[tuple[int, ...]] = ()
    tokenizer_sha256: ClassVar[bytes | None] = None
    vocab_size: ClassVar[int] = 0

    def __init__(self) -> None:
        self._replies: list[_Written] = []
        self._number_of: dict[str, int] = {}

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec]) -> Rendering:
        """Returns the ids of a conversation."""
        shown: list[int] = []
        if tools:
            shown += [*_packed(json.dumps([tool.as_schema() for tool in tools])), _END]
        return self._written(messages, shown)

    def extend(
        self,
        ids: Sequence[int],
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec],
        history: Sequence[Message] = (),
    ) -> Rendering:
        """Returns the ids of the messages; a reply needs no end."""
        return self._written(messages, [])

    def render_again(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec],
        ids: Sequence[int],
        written: Sequence[tuple[int, int]],
    ) -> Rendering:
        """Returns the ids: the address gets messages, so that its template alone could differ."""
        return Rendering(ids=tuple(ids))

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns one id per three bytes of UTF-8."""
        return tuple(_packed(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the JSON of messages, a line each, and the text of replies."""
        return "".join(
            part if isinstance(part, str) else part.text + "\n" for part in self._parts(token_ids)
        )

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[ToolSpec] = (),
        prompt: Sequence[int] = (),
    ) -> ParsedCompletion:
        """Returns the reply that the ids stand for."""
        replies = [part for part in self._parts(token_ids) if isinstance(part, _Written)]
        return replies[0].parsed if replies else _EMPTY

    def add(self, reply: Reply) -> tuple[int, ...]:
        """Returns the ids of a reply, as many as it has tokens."""
        parsed, text = _parsed(reply, len(self._replies))
        requests = zip(parsed.requests, reply.calls, strict=True)
        sent: dict[str, object] = {"role": "assistant", "content": reply.content}
        if reply.calls:
            sent["tool_calls"] = [_call(request.id, *call) for request, call in requests]
        if not parsed.malformed:  # of these the message lacks what is sent
            self._number_of[_key(parsed.message)] = len(self._replies)
        self._replies.append(_Written(text, parsed, sent, reply.num_tokens))
        return self._ids_of(len(self._replies) - 1)

    def request(
        self, prompt: Sequence[int], images: Sequence[PlacedImage]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns the messages and the tools that a prompt stands for, as the address takes them.

        Args:
            images: The images of the prompt, in the order of their placeholders.
        """
        messages: list[dict[str, Any]] = []
        tools: list[dict[str, Any]] = []
        shown = iter(images)
        for part in self._parts(prompt):
            if isinstance(part, _Written):
                messages.append(dict(part.sent))
                continue
            read = json.loads(part)
            if isinstance(read, list):
                tools = read
                continue
            if isinstance(read["content"], list):
                read["content"] = [
                    item if item["type"] == "text" else _image_part(next(shown).image)
                    for item in read["content"]
                ]
            messages.append(read)
        return messages, tools

    def _written(self, messages: Sequence[Message], ids: list[int]) -> Rendering:
        images: list[PlacedImage] = []
        for message in messages:
            if message.role == "assistant" and (
                (number := self._number_of.get(_key(message))) is not None
            ):
                ids += self._ids_of(number)
                continue
            ids += [*_packed(json.dumps(_sent(message), ensure_ascii=False)), _END]
            for image in message.images:
                images.append(PlacedImage(image=image, start=len(ids), num_tokens=1))
                ids.append(_IMAGE)
        return Rendering(ids=tuple(ids), images=tuple(images))

    def _ids_of(self, number: int) -> tuple[int, ...]:
        return (_FIRST_REPLY + number, *[_PAD] * (self._replies[number].num_tokens - 1))

    def _parts(self, ids: Sequence[int]) -> Iterator[str | _Written]:
        """Yields the messages as lines of JSON, and the replies."""
        text = bytearray()
        for token in ids:
            if token >= _FIRST_REPLY:
                yield self._replies[token - _FIRST_REPLY]
            elif token == _END:
                yield text.decode(errors="replace") + "\n"
                text.clear()
            elif token > _IMAGE:
                text += (token & 0xFFFFFF).to_bytes(token >> 24, "big")
        if text:
            yield text.decode(errors="replace")


def _packed(text: str) -> Iterator[int]:
    data = text.encode()
    for start in range(0, len(data), _BYTES_PER_ID):
        piece = data[start : start + _BYTES_PER_ID]
        yield len(piece) << 24 | int.from_bytes(piece, "big")


def _parsed(reply: Reply, turn: int) -> tuple[ParsedCompletion, str]:
    """Returns the reply as a parser of loops would, and its text with the calls.

    Args:
        turn: Tells its calls from those of other replies, whose answers one request has too.
    """
    text = reply.content
    calls: list[ToolCall] = []
    starts: list[int] = []
    malformed: list[MalformedCall] = []
    for number, (name, arguments) in enumerate(reply.calls):
        start, text = len(text), f"{text}\n{name}({arguments})"
        call_id = f"call_{turn}_{number}"
        reason = "the arguments must be a JSON object"
        try:
            read = json.loads(arguments or "{}")
            if _is_deep(read):
                raise RecursionError
        except ValueError as error:
            read, reason = None, f"the arguments are not JSON: {error}"
        except RecursionError:
            read, reason = None, f"the arguments are nested in more than {_MAX_DEPTH} levels"
        if isinstance(read, dict):
            calls.append(ToolCall(id=call_id, name=name, arguments=read))
            starts.append(start)
        else:
            malformed.append(
                MalformedCall(
                    text=text[start:],
                    start=start,
                    stop=len(text),
                    reason=reason,
                    id=call_id,
                    name=name,
                )
            )
    message = Message(
        role="assistant",
        content=reply.content,
        tool_calls=tuple(calls),
        reasoning=reply.reasoning,
    )
    parsed = ParsedCompletion(
        message=message, call_starts=tuple(starts), malformed=tuple(malformed)
    )
    return parsed, text


def _is_deep(value: object) -> bool:
    """Returns whether a value of JSON has more than `_MAX_DEPTH` levels, without recursion."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        lists = [each for each in level if isinstance(each, list)]
        lists += [list(each.values()) for each in level if isinstance(each, dict)]
        level = [child for each in lists for child in each]
    return any(isinstance(each, list | dict) for each in level)


def _sent(message: Message) -> dict[str, object]:
    """Returns the message as the address takes it, without the data of images."""
    sent: dict[str, object] = {"role": message.role, "content": message.content}
    if message.images:
        sent["content"] = [
            {"type": "image"} if isinstance(part, Image) else {"type": "text", "text": part}
            for part in message.parts
        ]
    if message.tool_calls:
        sent["tool_calls"] = [
            _call(call.id, call.name, json.dumps(dict(call.arguments), ensure_ascii=False))
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        sent["tool_call_id"] = message.tool_call_id
    return sent


def _call(call_id: str, name: str, arguments: str) -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _image_part(image: Image) -> dict[str, object]:
    data = base64.b64encode(image.data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{image.mime};base64,{data}"}}


def _key(message: Message) -> str:
    calls = [(call.id, call.name, dict(call.arguments)) for call in message.tool_calls]
    return json.dumps([message.content, message.reasoning, calls], sort_keys=True, default=str)
