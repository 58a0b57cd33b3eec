"""Where an assistant's turn ends in the text of a chat template.

Invariant: a turn ends with an added token of the tokenizer, because only there the text behind it
can be tokenised alone. Which one is told by two renderings of the same turn, one with nothing
behind it and one with an answer. Pure.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """How a template ends an assistant's turn that something follows.

    Attributes:
        token: The added token that ends it. Where turns have no end of their own (GLM), it is the
            first token of the next header.
        skipped: Added tokens between the turn's text and `token`; the model samples them.
        stop: What the model samples to end the turn; another token where the template writes one
            for the last turn and replaces it later (gpt-oss: <|return|>, then <|end|>).
    """

    token: str
    skipped: int
    stop: str


class AddedTokens:
    """The added tokens of a tokenizer, as texts.

    Args:
        tokens: Their texts; at which the tokenizer splits.
        eos: The one that ends a sequence, None when there is none.
    """

    def __init__(self, tokens: Iterable[str], *, eos: str | None) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._eos = eos

    def any_in(self, text: str) -> bool:
        """Returns whether the text holds one."""
        return self._pattern.search(text) is not None

    def cut(self, text: str, end: TurnEnd) -> tuple[str, str] | None:
        """Splits what follows a turn's text before the turn's end; None when that is not there."""
        match = next(itertools.islice(self._pattern.finditer(text), end.skipped, None), None)
        if match is None or match[0] != end.token:
            return None
        return text[: match.start()], text[match.start() :]

    def find_end(self, closed: str, followed: str, *, implied: bool) -> TurnEnd | None:
        """Finds the added token that ends a turn.

        It is the first of: the end-of-sequence token; the last token that is written in both
        cases; the first one that is written only when something follows.

        Args:
            closed: What is written after the turn's text when the turn is the last.
            followed: What is written between it and an answer.
            implied: Turns have no end of their own, so that what is written in both cases still
                belongs to the turn, if anything comes after it.

        Returns:
            None when there is no added token.
        """
        mine, theirs = list(self._pieces(closed)), list(self._pieces(followed))
        shared = _shared(mine, theirs)
        places = [place for place, piece in enumerate(theirs) if self._is_token(piece)]
        inside = [place for place in places if place < shared][-1:]
        outside = [place for place in places if place >= shared][:1]
        eos = [place for place in places if theirs[place] == self._eos][:1]
        candidates = eos + (outside + inside if implied else inside + outside)
        if not candidates:
            return None
        token = theirs[candidates[0]]
        own = [piece for piece in mine if self._is_token(piece)]
        replaced = own and not implied and token not in own
        return TurnEnd(
            token=token,
            skipped=places.index(candidates[0]),
            stop=own[-1] if replaced else token,
        )

    def _is_token(self, piece: str) -> bool:
        return self._pattern.fullmatch(piece) is not None

    def _pieces(self, text: str) -> Iterator[str]:
        """The added tokens of a text, and the text between them."""
        place = 0
        for match in self._pattern.finditer(text):
            if match.start() > place:
                yield text[place : match.start()]
            yield match[0]
            place = match.end()
        if place < len(text):
            yield text[place:]


def _shared(left: Sequence[str], right: Sequence[str]) -> int:
    """The length of the common beginning."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
