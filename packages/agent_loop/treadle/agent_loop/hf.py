"""The renderer of Hugging Face tokenizers and their chat templates (extra `hf`).

Invariant: what `extend` returns is what the template writes after a closed assistant turn, token
for token, the newline after the end-of-turn mark included (verl issue #6501 is that newline
missing). How: render a synthetic conversation with and without the new messages, take the text
after a marker in its assistant turn, and tokenise that text alone. It begins with a special token,
at which every tokenizer splits, so tokenising it alone and in its context give the same ids. The
ids that were sampled are never decoded and encoded again.

Construction checks that the template and the tokenizer allow this, and refuses them otherwise.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from treadle.agent_loop.errors import RenderError, SetupError, boundary
from treadle.agent_loop.parsers import HermesParser, ToolCallParser
from treadle.agent_loop.renderer import ParsedCompletion, Rendering
from treadle.agent_loop.types import Message, ToolSpec

_MARKER = "treadle-boundary"
_CLOSED_TURN = (
    Message(role="user", content="question"),
    Message(role="assistant", content=_MARKER),
)


class HfRenderer:
    """Renders chats with a tokenizer's own template.

    Args:
        tokenizer: With a chat template.
        tokenizer_sha256: Of the bytes of its tokenizer.json; compared with the servers'.
        parser: Reads tool calls.
        template_kwargs: Handed to the template, as `enable_thinking`.

    Attributes:
        tokenizer_sha256: 32 bytes, or None when the tokenizer has no file.
        vocab_size: Ids that the tokenizer knows, added tokens included. A model's embedding may
            be larger.
        eos_token_id: The tokenizer's end-of-sequence id, None when it has none.
        stop_token_ids: The template's end-of-turn id, then the end-of-sequence id.

    Raises:
        SetupError: The template is missing, or its turns do not end with a special token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tokenizer_sha256: bytes | None = None,
        parser: ToolCallParser | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        self._tokenizer: Any = tokenizer
        self._parser = parser if parser is not None else HermesParser()
        self._template_kwargs = dict(template_kwargs or {})
        self.tokenizer_sha256 = tokenizer_sha256
        self.vocab_size = len(self._tokenizer)
        self.eos_token_id: int | None = self._tokenizer.eos_token_id
        if not self._tokenizer.chat_template:
            raise SetupError("the tokenizer has no chat template: add chat_template.jinja")
        self._turn_end_id = self._find_turn_end()
        stops = [self._turn_end_id]
        if self.eos_token_id not in (None, self._turn_end_id):
            stops.append(self.eos_token_id)
        self.stop_token_ids: tuple[int, ...] = tuple(stops)
        # A server may end a turn with another id than ours, as Qwen's <|endoftext|>.
        self._closing_ids = frozenset((*stops, *self._tokenizer.all_special_ids))

    @classmethod
    def from_directory(
        cls,
        directory: str | Path,
        *,
        parser: ToolCallParser | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> "HfRenderer":
        """Loads a tokenizer from a model directory, without a network.

        Raises:
            SetupError: The directory holds no tokenizer.json, or it does not load.
        """
        file = Path(directory) / "tokenizer.json"
        if not file.is_file():
            raise SetupError(f"{directory} holds no tokenizer.json")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except Exception as error:  # the libraries raise whatever the file makes them stumble over
            raise SetupError(
                f"the tokenizer in {directory} does not load: {type(error).__name__}: {error}"
            ) from error
        return cls(
            tokenizer,
            tokenizer_sha256=hashlib.sha256(file.read_bytes()).digest(),
            parser=parser,
            template_kwargs=template_kwargs,
        )

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec]) -> Rendering:
        """Returns the ids of a conversation, open for the assistant's turn.

        Raises:
            RenderError: The template refuses these messages, or one has images.
        """
        return Rendering(ids=self.encode(self._text(messages, tools, open_turn=True)))

    def extend(
        self, ids: Sequence[int], messages: Sequence[Message], *, tools: Sequence[ToolSpec]
    ) -> Rendering:
        """Returns the ids that follow the sampled turn at the end of `ids`.

        Raises:
            RenderError: The template refuses these messages, or writes the turn before them
                differently than without them.
        """
        closed = self._text(_CLOSED_TURN, tools, open_turn=False)
        if closed.count(_MARKER) > 1:
            raise RenderError(f"a tool's schema holds {_MARKER!r}, which is kept for us: reword it")
        before = _after_marker(closed)
        whole = self._text((*_CLOSED_TURN, *messages), tools, open_turn=True)
        after = _after_marker(whole)
        if not after.startswith(before):
            raise RenderError(
                f"the template ends a turn with {before!r}, but writes {after[:80]!r} once "
                f"{[m.role for m in messages]} follow: the conversation cannot be extended exactly"
            )
        extension = self.encode(after)
        return Rendering(ids=extension[1:] if ids[-1] == self._turn_end_id else extension)

    def parse(self, token_ids: Sequence[int]) -> ParsedCompletion:
        """Reads the ids of one completion; special ids at its end are no part of its text."""
        ids = list(token_ids)
        while ids and ids[-1] in self._closing_ids:
            ids.pop()
        parsed = self._parser.parse(self.decode(ids))
        return ParsedCompletion(
            message=Message(role="assistant", content=parsed.content, tool_calls=parsed.calls),
            call_starts=parsed.call_starts,
            malformed=parsed.malformed,
        )

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the ids of a text; marks of special tokens in it become special ids.

        Raises:
            RenderError: The tokenizer refuses the text.
        """
        with boundary(RenderError, "tokenizer"):  # it refuses lone surrogates
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of ids, special tokens included."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _find_turn_end(self) -> int:
        try:
            after = _after_marker(self._text(_CLOSED_TURN, (), open_turn=False))
        except RenderError as error:
            raise SetupError(f"the chat template cannot render a plain chat: {error}") from error
        ids = self.encode(after)
        if not ids or ids[0] not in self._tokenizer.added_tokens_decoder:
            raise SetupError(
                f"the chat template ends an assistant's turn with {after!r}, which does not begin "
                "with a special token: turns cannot be extended exactly"
            )
        return ids[0]

    def _text(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, open_turn: bool
    ) -> str:
        if any(message.images for message in messages):
            raise RenderError("a message has images, and this renderer is of a text model")
        with boundary(RenderError, "chat template"):
            text: str = self._tokenizer.apply_chat_template(
                [_as_dict(message) for message in messages],
                tools=[tool.as_schema() for tool in tools] or None,
                add_generation_prompt=open_turn,
                tokenize=False,
                **self._template_kwargs,
            )
            return text


def _after_marker(text: str) -> str:
    """What follows the synthetic turn's text; the messages after it may hold the marker too."""
    _, marker, after = text.partition(_MARKER)
    if not marker:
        raise RenderError("the chat template drops the assistant's text")
    return after


def _as_dict(message: Message) -> dict[str, object]:
    """The message as chat templates know it."""
    entry: dict[str, object] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        entry["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        entry["name"] = message.name
    if message.reasoning is not None:
        entry["reasoning_content"] = message.reasoning
    return entry
