"""A chat renderer without a tokenizer: one id per UTF-8 byte, and one per mark.

Ids 0 to 255 are bytes. A message is [start of its role] bytes [END]; the start id of the assistant
opens its next turn. A tool message has no label except its role. Tools are shown as one system
message with their schemas. Calls are written in the hermes format. An image is one [IMAGE], plus
one per 64 bytes of its data.

Invariant: decoding and encoding are exact inverses, so that a test can write ids as text.
"""

import json
from collections.abc import Sequence

from treadle.agent_loop.parsers import HermesParser, ToolCallParser
from treadle.agent_loop.parsers.base import FramingParser, StreamingParser
from treadle.agent_loop.tokens.renderer import CallFrame, ParsedCompletion, PlacedImage, Rendering
from treadle.agent_loop.types import Image, Message, ToolSpec

END = 256
_STARTS = {"system": 257, "user": 258, "assistant": 259, "tool": 260}
IMAGE = 261
_MARKS = {END: "<end>", IMAGE: "<image>", **{start: f"<{role}>" for role, start in _STARTS.items()}}


class ByteRenderer:
    """Renders chats as bytes.

    Attributes:
        stop_token_ids: The id that ends every message.
        tokenizer_sha256: None, because there is no tokenizer to compare with a server's.
    """

    vocab_size = 262
    stop_token_ids = (END,)
    tokenizer_sha256: bytes | None = None

    def __init__(self, parser: ToolCallParser | None = None) -> None:
        self._parser = parser if parser is not None else HermesParser()

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec]) -> Rendering:
        """Returns the ids of a conversation, ready for the assistant's next turn."""
        shown = list(messages)
        if tools:
            schemas = json.dumps([tool.as_schema() for tool in tools])
            shown.insert(0, Message(role="system", content=schemas))
        return self._write((), shown)

    def extend(
        self,
        ids: Sequence[int],
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec],
        history: Sequence[Message] = (),
    ) -> Rendering:
        """Returns the end of the turn if it is missing, then the messages and the next header."""
        return self._write(() if ids[-1] == END else (END,), messages)

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns one id per UTF-8 byte."""
        return encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of ids; marks are written as "<end>", "<user>" and so on."""
        return decode(token_ids)

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[ToolSpec] = (),
        prompt: Sequence[int] = (),
    ) -> ParsedCompletion:
        """Parses a completion; invalid UTF-8 becomes replacement characters."""
        text = decode([t for t in token_ids if t < END])
        parsed = self._parser.parse(text, tools=tools, prompt_end=decode(prompt[-16:]))
        return ParsedCompletion(
            message=Message(
                role="assistant",
                content=parsed.content,
                tool_calls=parsed.calls,
                reasoning=parsed.reasoning,
            ),
            call_starts=parsed.call_starts,
            malformed=parsed.malformed,
            content_start=parsed.content_start,
        )

    def settled(self, text: str, *, prompt: Sequence[int]) -> tuple[str, str]:
        """As in `StreamingRenderer`; empty unless the parser can stream."""
        if not isinstance(self._parser, StreamingParser):
            return "", ""
        so_far = self._parser.settled(text, prompt_end=decode(prompt[-16:]))
        return so_far.reasoning, so_far.content

    def call_frame(self, name: str) -> CallFrame | None:
        """As in `FramingRenderer`."""
        return self._parser.call_frame(name) if isinstance(self._parser, FramingParser) else None

    def _write(self, before: Sequence[int], messages: Sequence[Message]) -> Rendering:
        ids, images = list(before), list[PlacedImage]()
        for message in messages:
            ids.append(_STARTS[message.role])
            if message.role == "assistant":
                text = self._parser.render(
                    message.content, message.tool_calls, reasoning=message.reasoning or ""
                )
                ids.extend(encode(text))
            for part in message.parts if message.role != "assistant" else ():
                if isinstance(part, Image):
                    count = 1 + len(part.data) // 64
                    images.append(PlacedImage(image=part, start=len(ids), num_tokens=count))
                    ids.extend([IMAGE] * count)
                else:
                    ids.extend(encode(part))
            ids.append(END)
        ids.append(_STARTS["assistant"])
        return Rendering(ids=tuple(ids), images=tuple(images))


def encode(text: str) -> tuple[int, ...]:
    """Returns one id per UTF-8 byte."""
    return tuple(text.encode())


def decode(token_ids: Sequence[int]) -> str:
    """Returns the text of ids; marks are written as "<end>", "<user>" and so on."""
    parts: list[str] = []
    run = bytearray()
    for token in token_ids:
        if token < END:
            run.append(token)
        else:
            parts.extend([run.decode(errors="replace"), _MARKS[token]])
            run.clear()
    return "".join([*parts, run.decode(errors="replace")])
