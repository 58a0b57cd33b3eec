"""The renderer of Hugging Face tokenizers and their chat templates (extra `[hf]`).

Invariant: `extend` returns what the template writes after a closed assistant turn, token for
token, including the newline after the end-of-turn mark (which is missing in verl issue #6501).
`template` finds that text. It is tokenised alone; because it begins with an added token, at which
every tokenizer splits, the ids are the same as in context. Sampled ids are never decoded and
encoded again.

A turn that was cut, or that another id ended, is closed first: `_closing` finds which elements of
the format are open in it, and writes the template's marks for them and nothing else.

So an extension stays exact if the template rewrites earlier messages, for example drops the
reasoning of earlier turns: the model continues from the ids that it sampled, not from the rewritten
ones. `retokenization_drift` reports such places. `extend` refuses where it would have to guess: if
the template refuses or drops the messages, or ends the turn differently before them.
docs/chat_templates.md lists what holds for which template.

The constructor checks that the template and the tokenizer allow this, and refuses them otherwise.
"""

import copy
import hashlib
import re
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from treadle.agent_loop.errors import PromptTooLongError, RenderError, SetupError, boundary
from treadle.agent_loop.hf.pieces import PieceEncoder
from treadle.agent_loop.hf.template import PROBE_CALL, PROBE_TOOL, ChatTemplate
from treadle.agent_loop.parsers import (
    PARSER_NAMES,
    ToolCallParser,
    UnclosedReasoning,
    parser_for_template,
    parser_named,
)
from treadle.agent_loop.parsers.base import ClosingParser, FramingParser, StreamingParser
from treadle.agent_loop.parsers.format_parser import FormatParser
from treadle.agent_loop.tokens.renderer import CallFrame, ParsedCompletion, Rendering
from treadle.agent_loop.types import Message, ToolSpec

if TYPE_CHECKING:
    from treadle.agent_loop.hf.vision import ImagePlaceholders

_TEXT_MODEL = "this model reads text only: send no images, or take a model that sees"
_USUAL_CHARACTERS = 4  # per token; a text with no more is simply encoded
_PIECE = 1 << 16  # characters
_ID_BYTES = array("I").itemsize
_OPENS = re.compile(r"<\|\w+>")
_CALL_MARK = re.compile(r"<[^<>\s]*tool_?call[^<>\s]*>", re.IGNORECASE)
_PROMPT_END = 16  # number of ids that show whether the template has opened the reasoning


class HfRenderer:
    """Renders chats with a tokenizer's own template.

    Args:
        tokenizer: A tokenizer with a chat template.
        tokenizer_sha256: Hash of the bytes of its tokenizer.json; compared with the servers'.
        parser: Parser of tool calls and reasoning, or its name. None means the template's, or
            hermes if the template's is not known.
        template_kwargs: Passed to the template, for example `enable_thinking`.
        unclosed: The meaning of a call behind reasoning that was never closed; a parser object has
            its own.
        placeholders: Expander of image placeholders, or the error text for messages with images.

    Attributes:
        tokenizer_sha256: 32 bytes, or None if the tokenizer has no file.
        vocab_size: Number of ids in the tokenizer, including added tokens. A model's embedding
            may be larger.
        eos_token_id: The tokenizer's end-of-sequence id, None if it has none.
        stop_token_ids: Ids that end a turn: the template's, then the end-of-sequence id, then
            those of the parser's format.

    Raises:
        SetupError: The template is missing, or its turns do not end with a special token, or the
            parser belongs to another family, whose stop tokens are not in the tokenizer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tokenizer_sha256: bytes | None = None,
        parser: ToolCallParser | str | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        unclosed: UnclosedReasoning = UnclosedReasoning.CALL,
        placeholders: "ImagePlaceholders | str" = _TEXT_MODEL,
    ) -> None:
        self._tokenizer: Any = tokenizer
        self._placeholders = placeholders
        self._max_tokens: int | None = None
        self.tokenizer_sha256 = tokenizer_sha256
        self.vocab_size = len(self._tokenizer)
        self.eos_token_id: int | None = self._tokenizer.eos_token_id
        self.template = ChatTemplate(self._tokenizer, template_kwargs or {})
        if parser is None:
            parser = parser_for_template(str(self._tokenizer.chat_template))
        known = parser is not None
        parser = parser or "hermes"
        if isinstance(parser, str):
            parser = parser_named(parser, unclosed=unclosed)
        self.parser = parser
        self._reads_prompt_end = _reads_prompt_end(self.parser)
        self._backend = _backend_of(tokenizer)
        self._pieces = None if self._backend is None else PieceEncoder.of(self._backend)
        # The first call settles the tokenizer's own settings; later ones, of any thread, read them.
        self._tokenizer.encode("", add_special_tokens=False)
        self._tool_problem = self._find_tool_problem(known=known)
        added = self._tokenizer.added_tokens_decoder
        self._added_ids: dict[str, int] = {token.content: i for i, token in added.items()}
        ids = [self._added_ids[token] for token in self.template.stops]
        ids += [] if self.eos_token_id is None else [self.eos_token_id]
        ids += [self._id_of_stop(token) for token in self.parser.stop_tokens]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ids))
        # A server may end a turn with a different id, such as Qwen's <|endoftext|>.
        self._closing_ids = frozenset((*ids, self._tokenizer.pad_token_id))
        # Each of these ends any turn; Gemma's <|tool_response> opens what follows the turn instead.
        self._own_ends = frozenset(
            self._added_ids[token] for token in self.parser.stop_tokens if not _OPENS.match(token)
        )
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        headers = [array("I", self._encode(header)) for header in self.template.headers]
        self._headers = tuple(header.tobytes() for header in headers)
        # Whether what the template writes behind a text is only what closes the elements before it.
        marks = "".join(self._unclosed(self.template.opened))
        self._closes_elements = self.template.plain_closing.strip() == marks

    @classmethod
    def from_directory(
        cls,
        directory: str | Path,
        *,
        parser: ToolCallParser | str | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        unclosed: UnclosedReasoning = UnclosedReasoning.CALL,
    ) -> "HfRenderer":
        """Loads a tokenizer, and an image processor if there is one, without network access.

        Text chats need no image processor: one that cannot be loaded is an error only for messages
        with images, with the reason.

        Raises:
            SetupError: The directory has no tokenizer.json, or it does not load.
        """
        folder = Path(directory)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise SetupError(f"{directory} holds no tokenizer.json")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except Exception as error:  # the libraries raise errors of any type for a bad file
            raise SetupError(
                f"the tokenizer in {directory} does not load: {type(error).__name__}: {error}"
            ) from error
        return cls(
            tokenizer,
            tokenizer_sha256=hashlib.sha256(file.read_bytes()).digest(),
            parser=parser,
            template_kwargs=template_kwargs,
            unclosed=unclosed,
            placeholders=_load_placeholders(folder, tokenizer),
        )

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec]) -> Rendering:
        """Returns the ids of a conversation, ready for the assistant's next turn.

        Raises:
            RenderError: The template refuses these messages, or images cannot be rendered.
            SetupError: There are tools, and the template does not show them or their results, or
                no parser is known for its calls, or the parser cannot parse them.
        """
        if tools and not self.template.shows_tools:
            raise SetupError(
                f"the chat template does not show tools to the model: {[t.name for t in tools]} "
                "would be missing from every prompt. Take a model whose template has tools, put "
                "such a template into its directory as chat_template.jinja, or use a loop "
                "without tools"
            )
        if tools and self._tool_problem is not None:
            raise SetupError(self._tool_problem)
        self._check_images(messages)
        text = self.template.text(messages, tools, open_turn=True)
        return self._placed(self._encode_chat(text, keep=True), messages)

    def render_finished(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSpec]
    ) -> tuple[int, ...]:
        """As in `FinishingRenderer`."""
        self._check_images(messages)
        text = self.template.text(messages, tools, open_turn=False)
        return self._placed(self._encode_chat(text), messages).ids

    def render_again(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec],
        ids: Sequence[int],
        written: Sequence[tuple[int, int]],
    ) -> Rendering:
        """As in `RerenderingRenderer`: tokenises the pieces only that are not in `written`.

        Raises:
            RenderError: The template refuses these messages, or images cannot be rendered.
        """
        self._check_images(messages)
        text = self.template.text(messages, tools, open_turn=True)
        known = {} if self._pieces is None else self._pieces.pieces(ids, written)
        return self._placed(self._encode_chat(text, known=known), messages)

    def extend(
        self,
        ids: Sequence[int],
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec],
        history: Sequence[Message] = (),
    ) -> Rendering:
        """Returns the ids that follow the sampled turn at the end of `ids`.

        Raises:
            RenderError: The template refuses these messages, drops them, or ends the turn before
                them differently than it ends other turns.
        """
        self._check_images(messages)
        after = self.template.after_turn(messages, tools, history=history)
        ended = any(ids[-1] == self._added_ids[end] for end in after.ends)
        if ended or ids[-1] in self._own_ends:
            # Tokenise with the end-of-turn token in front: some tokenizers treat the start of a
            # text differently, and some added tokens swallow the space after them.
            return self._placed(self._encode_chat(after.text)[1:], messages)
        text = self._closing(ids, after.closing) + after.text
        return self._placed(self._encode_chat(text), messages)

    def _closing(self, ids: Sequence[int], closing: str) -> str:
        """Returns what closes a turn that does not end with the template's own end.

        That is what closes each open element, as the template writes it, without what the model
        wrote of it. Nothing of the turn that the template was rendered with is in it.

        Args:
            closing: Text of the template between a turn's text and its end.
        """
        text = self.decode(self._turn(ids))
        if marks := self._unclosed(text):
            closing = "".join(map(self.template.as_closed, marks))
        elif self._closes_elements:
            # No element is open. White space is what may be left; behind an id that ended the turn
            # it is of no use.
            closing = "" if ids[-1] in self._special_ids else closing[len(closing.rstrip()) :]
        written = next(n for n in range(len(closing), -1, -1) if text.endswith(closing[:n]))
        return closing[written:]

    def _unclosed(self, text: str) -> tuple[str, ...]:
        return self.parser.unclosed(text) if isinstance(self.parser, ClosingParser) else ()

    def _turn(self, ids: Sequence[int]) -> Sequence[int]:
        """Returns the ids from the header of the last turn on; all of them if there is none."""
        data, start = array("I", ids).tobytes(), -1
        for header in self._headers:
            found = data.rfind(header)
            while found > 0 and found % _ID_BYTES:  # between two ids
                found = data.rfind(header, 0, found + len(header) - 1)
            start = max(start, found)
        return ids[max(start, 0) // _ID_BYTES :]

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[ToolSpec] = (),
        prompt: Sequence[int] = (),
    ) -> ParsedCompletion:
        """Parses the ids of one completion; its text excludes the id that ended it."""
        ids = list(token_ids)
        if ids and ids[-1] in self._closing_ids:
            ids.pop()
        prompt_end = self.decode(prompt[-_PROMPT_END:]) if self._reads_prompt_end else ""
        parsed = self.parser.parse(self.decode(ids), tools=tools, prompt_end=prompt_end)
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
        """See `StreamingRenderer`; returns empty texts if the parser is no `StreamingParser`."""
        if not isinstance(self.parser, StreamingParser):
            return "", ""
        so_far = self.parser.settled(text, prompt_end=self.decode(prompt[-_PROMPT_END:]))
        return so_far.reasoning, so_far.content

    def call_frame(self, name: str) -> CallFrame | None:
        """See `FramingRenderer`; returns None if the parser is no `FramingParser`."""
        return self.parser.call_frame(name) if isinstance(self.parser, FramingParser) else None

    def bounded(self, max_tokens: int) -> "HfRenderer":
        """Returns this renderer with a bound on the ids of one text.

        `render`, `extend` and `encode` raise `PromptTooLongError` for a text whose pieces have more
        than twice `max_tokens` ids. Cutting a text adds a few ids at each cut, far fewer than a
        piece has, so no text that fits is refused.
        """
        renderer = copy.copy(self)
        renderer._max_tokens = max_tokens
        return renderer

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the ids of a text; special tokens in it become special ids.

        Raises:
            RenderError: The tokenizer refuses the text.
            PromptTooLongError: The renderer is bounded, and the text is longer.
        """
        self._check_length(text)
        return self._encode(text)

    def _encode_chat(
        self, text: str, *, known: Mapping[str, Sequence[int]] | None = None, keep: bool = False
    ) -> tuple[int, ...]:
        """Encodes a text of the template; reuses ids of its pieces if the tokenizer allows it."""
        if self._pieces is None or not self._backend_is_free():
            return self.encode(text)
        self._check_length(text)
        with boundary(RenderError, "tokenizer"):
            return self._pieces.encode(text, known=known or {}, keep=keep)

    def _check_length(self, text: str) -> None:
        """Counts the ids of a text piece by piece, and stops where it exceeds the bound."""
        max_tokens, counted = self._max_tokens, 0
        if max_tokens is None or len(text) <= max_tokens * _USUAL_CHARACTERS:
            return
        for start in range(0, len(text), _PIECE):
            counted += len(self._encode(text[start : start + _PIECE]))
            if counted > 2 * max_tokens:
                raise PromptTooLongError(
                    f"the text has {len(text)} characters, and the first {start + _PIECE} of them "
                    f"are {counted} tokens; {max_tokens} fit"
                )

    def _encode(self, text: str) -> tuple[int, ...]:
        with boundary(RenderError, "tokenizer"):  # it refuses lone surrogates
            backend = self._backend
            if backend is not None and self._backend_is_free():
                # As `encode`, but without the places of the tokens, a fifth of its time.
                return tuple(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _backend_is_free(self) -> bool:
        """Returns whether the library's tokenizer has no settings of another user of it."""
        return self._backend.truncation is None and self._backend.padding is None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of ids, including special tokens."""
        text: str
        if self._backend is not None:
            text = self._backend.decode(list(token_ids), skip_special_tokens=False)
            return text
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _placed(self, ids: tuple[int, ...], messages: Sequence[Message]) -> Rendering:
        images = any(message.images for message in messages)
        if not images or isinstance(self._placeholders, str):
            return Rendering(ids=ids)
        return self._placeholders.place(ids, messages, self._encode)

    def _check_images(self, messages: Sequence[Message]) -> None:
        """Raises before a text model's template is given parts, which it takes for a string."""
        for place, message in enumerate(messages):
            if message.images and isinstance(self._placeholders, str):
                raise RenderError(
                    f"messages[{place}], of role {message.role}, has images, and "
                    f"{self._placeholders}"
                )

    def _id_of_stop(self, token: str) -> int:
        if token not in self._added_ids:
            raise SetupError(
                f"the parser reads turns that end with {token!r}, which this tokenizer does "
                f"not know; its chat template asks for {self._fitting()}"
            )
        return self._added_ids[token]

    def _find_tool_problem(self, *, known: bool) -> str | None:
        """Returns why a conversation with tools would fail; None if it would not.

        Args:
            known: Whether the parser was given, or is the one of the template's family.
        """
        template, written = self.template, self.template.probe_call
        if template.tool_problem is not None:
            return (
                f"the chat template cannot show what tools return ({template.tool_problem}): every "
                "conversation would fail at its first call. Put a template that can into the "
                "model's directory as chat_template.jinja, or use a loop without tools"
            )
        if written is None and not known:
            mark = _CALL_MARK.search(str(self._tokenizer.chat_template))
            return (
                "no parser is known for the calls that the chat template asks the model for"
                f"{f' (it speaks of {mark[0]})' if mark else ''}: name the one that reads them, "
                f"if it is one of {', '.join(PARSER_NAMES)}; else pass your own, or use a loop "
                "without tools"
            )
        if written is None or _reads(self.parser, written):
            return None
        return (
            f"the chat template writes a call as {written!r}, which the parser "
            f"does not read; it asks for {self._fitting()}"
        )

    def _fitting(self) -> str:
        written = self.template.probe_call
        names = [name for name in PARSER_NAMES if written and _reads(parser_named(name), written)]
        return f"the parser {' or '.join(names)}" if names else f"none of {', '.join(PARSER_NAMES)}"


def _backend_of(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Returns the library's tokenizer where `encode` and `decode` add nothing to it; else None.

    What they do around each call, mostly for batches, takes longer than a turn's text itself.
    """
    for kind in type(tokenizer).__mro__:
        if kind is PreTrainedTokenizerFast:
            return tokenizer.backend_tokenizer
        if not vars(kind).keys().isdisjoint(("encode", "_encode_plus", "decode", "_decode")):
            return None
    return None


def _reads_prompt_end(parser: ToolCallParser) -> bool:
    """Returns whether a parser may look at the end of the prompt, which is decoded for it."""
    if not isinstance(parser, FormatParser) or type(parser).parse is not FormatParser.parse:
        return True
    return parser.reads_prompt_end


def _load_placeholders(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> "ImagePlaceholders | str":
    """Returns the placeholders of a model directory, or why it has none."""
    names = ("preprocessor_config.json", "processor_config.json")
    if not any((folder / name).is_file() for name in names):
        return _TEXT_MODEL
    from treadle.agent_loop.hf.vision import ImagePlaceholders  # imports Pillow

    try:
        return ImagePlaceholders.from_directory(folder, tokenizer)
    except SetupError as error:
        return str(error)


def _reads(parser: ToolCallParser, written: str) -> bool:
    calls = parser.parse(written, tools=(PROBE_TOOL,)).calls
    expected = [(PROBE_CALL.name, dict(PROBE_CALL.arguments))]
    return [(call.name, dict(call.arguments)) for call in calls] == expected
