"""The text of a turn while it is sampled: what of it can be shown before it is complete.

Invariant: what is shown is never taken back. All deltas of a turn together are the reasoning and
the content of its message, except that white space before the content stays if calls follow, which
the session takes as a harmless rewrite when the agent sends it back (`history`). Held back are:

- the last token, which may be the end of the turn,
- bytes that are no complete character yet,
- text that may begin a stop string, and everything after one,
- what the renderer has not settled: marks, and all that follows a mark of a call.

Pure. A token costs the decoding of a few tokens, and one search of the text for marks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.agent_loop.parsers.base import without_partial
from treadle.agent_loop.tokens.renderer import ChatRenderer, StreamingRenderer
from treadle.agent_loop.types import Completion, Message, TokenChunk

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4  # bytes, and so at most as many tokens
_MAX_PENDING = 64
"""Number of tokens without a complete character after which the rest is shown at the end."""


class StreamedTextError(RuntimeError):
    """The turn is another one than was shown; a bug of the renderer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnDelta:
    """The addition to a turn since the last one.

    Attributes:
        tokens: The sampled ids with their log-probabilities in nats, in order; those of text that
            is held back, too. All deltas together have all tokens of the turn.
    """

    reasoning: str = ""
    content: str = ""
    tokens: tuple[tuple[int, float], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tokens)


class StreamedText:
    """The text of one turn.

    Args:
        renderer: Decodes and parses it. One that settles nothing has everything at the end.
        prompt: The ids that the turn continues.
        stop: Strings that end the turn.
    """

    def __init__(
        self, renderer: ChatRenderer, *, prompt: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        self._renderer = renderer
        self._prompt = prompt
        self._stop = tuple(stop)
        self._tokens: list[tuple[int, float]] = []
        self._text = ""
        self._window = 0
        self._decoded = 0
        self._stopped = False
        self._reasoning = ""
        self._content = ""
        self._shown = 0

    def add(self, chunk: TokenChunk) -> TurnDelta:
        """Takes sampled tokens, and returns what can be shown now."""
        if self._stopped or not isinstance(self._renderer, StreamingRenderer):
            return TurnDelta()
        self._tokens += zip(chunk.token_ids, chunk.logprobs, strict=True)
        self._decode()
        text = self._text
        if found := [at for word in self._stop if (at := text.find(word)) >= 0]:
            self._stopped = True
            text = text[: min(found)]
        else:
            text = without_partial(text, *self._stop)
        reasoning, content = self._renderer.settled(text, prompt=self._prompt)
        new = [] if self._stopped else self._tokens[self._shown : -1]
        self._shown += len(new)
        return self._delta(reasoning, content, new)

    def end(self, completion: Completion, message: Message) -> TurnDelta:
        """Returns what has not been shown of the whole turn.

        Raises:
            StreamedTextError: The turn does not begin with what was shown.
        """
        reasoning, content = message.reasoning or "", message.content
        if not content.startswith(self._content):
            self._content = self._content.lstrip()
        if not (reasoning.startswith(self._reasoning) and content.startswith(self._content)):
            raise StreamedTextError(
                f"the text {self._reasoning + self._content!r:.200} was streamed, and the turn is "
                f"{reasoning + content!r:.200}"
            )
        tokens = [
            (token, logprob)
            for part in completion.chunks
            for token, logprob in zip(part.token_ids, part.logprobs, strict=True)
        ]
        return self._delta(reasoning, content, tokens[self._shown :])

    def _delta(
        self, reasoning: str, content: str, tokens: Sequence[tuple[int, float]]
    ) -> TurnDelta:
        delta = TurnDelta(
            reasoning=reasoning[len(self._reasoning) :],
            content=content[len(self._content) :],
            tokens=tuple(tokens),
        )
        self._reasoning = max(reasoning, self._reasoning, key=len)
        self._content = max(content, self._content, key=len)
        return delta

    def _decode(self) -> None:
        """Decodes all tokens but the last, from the last complete character on.

        The tokens before it are decoded again, because a token's text may depend on the one before.
        """
        stop = len(self._tokens) - 1
        ids = [token for token, _ in self._tokens[self._window : stop]]
        for dropped in range(_LONGEST_CHARACTER):
            if stop - dropped <= self._decoded:
                return
            text = self._renderer.decode(ids[: len(ids) - dropped])
            if not text.endswith(_UNFINISHED):
                known = self._renderer.decode(ids[: self._decoded - self._window])
                self._text += text[len(known) :]
                self._window, self._decoded = self._decoded, stop - dropped
                return
        self._stopped = stop - self._decoded > _MAX_PENDING
