"""A chat renderer without a tokenizer: one id per UTF-8 byte, and one per mark.

Ids 0 to 255 are bytes. A message is [start of its role] bytes [END]; the assistant's next turn is
opened by its start id. A tool message is labelled with nothing but its role. Tools are shown as
one system message of their schemas. Calls are written in the hermes format.

Invariant: decoding and encoding are exact inverses, so that a test can say ids in text.
"""

import json
from collections.abc import Sequence

from treadle.agent_loop.parsers import HermesParser, ToolCallParser
from treadle.agent_loop.renderer import ParsedCompletion
from treadle.agent_loop.types import Message, ToolSpec

END = 256
_STARTS = {"system": 257, "user": 258, "assistant": 259, "tool": 260}
_MARKS = {END: "<end>", **{start: f"<{role}>" for role, start in _STARTS.items()}}


class ByteRenderer:
    """Renders chats as bytes.

    Attributes:
        vocab_size: 261.
        stop_token_ids: The id that ends every message.
        tokenizer_sha256: None: there is no tokenizer to compare with a server's.
    """

    vocab_size = 261
    stop_token_ids = (END,)
    tokenizer_sha256: bytes | None = None

    def __init__(self, parser: ToolCallParser | None = None) -> None:
        self._parser = parser if parser is not None else HermesParser()

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec]) -> tuple[int, ...]:
        """Returns the ids of a conversation, open for the assistant's turn."""
        ids: list[int] = []
        if tools:
            schemas = json.dumps([tool.as_schema() for tool in tools])
            ids.extend(_message_ids(Message(role="system", content=schemas)))
        for message in messages:
            text = self._parser.render(message.content, message.tool_calls)
            ids.extend([_STARTS[message.role], *text.encode(), END])
        return (*ids, _STARTS["assistant"])

    def extend(
        self, ids: Sequence[int], messages: Sequence[Message], *, tools: Sequence[ToolSpec]
    ) -> tuple[int, ...]:
        """Returns the end of the turn if it is missing, the messages and the next header."""
        end = () if ids[-1] == END else (END,)
        new = [token for message in messages for token in _message_ids(message)]
        return (*end, *new, _STARTS["assistant"])

    def parse(self, token_ids: Sequence[int]) -> ParsedCompletion:
        """Reads a completion; bytes that are no UTF-8 become replacement characters."""
        parsed = self._parser.parse(decode([t for t in token_ids if t < END]))
        return ParsedCompletion(
            message=Message(role="assistant", content=parsed.content, tool_calls=parsed.calls),
            call_starts=parsed.call_starts,
            malformed=parsed.malformed,
        )


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


def _message_ids(message: Message) -> list[int]:
    return [_STARTS[message.role], *message.content.encode(), END]
