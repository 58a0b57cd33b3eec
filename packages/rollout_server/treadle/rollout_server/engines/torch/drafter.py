"""Drafts: tokens that a pass of the model reads before it is known that they are sampled.

A pass reads the last token of a sequence and its draft, and the sampler draws a token in each of
their places. A draw is a function of the seed, the position and the distribution, so the draws up
to and with the first one that differs from the draft are those of a run without drafts; what
follows is dropped. A poor draft costs time, and changes nothing.

A draft is what followed the same n-gram before: in the session's own context, in other samples of
its prompt, in earlier rollouts of the row. Their text is all in one index (`DraftIndex`), which
outlives requests and weights.

The length of a draft is what pays: it grows while the probability that all of it is accepted is
above `_WORTH`. That of a token is how often tokens were right after n-grams of its order that
agreed as often on what follows, lowered in a sequence that had less luck than expected. Of the
orders, the one that promises most is followed. A sequence without a draft still compares one token,
so the rates remain true where nothing is drafted.
"""

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from treadle.rollout_server.engines.torch.draft_index import (
    MOST_AGREEMENT,
    ORDERS,
    DraftIndex,
    DraftText,
)

INDEXED_IDS = 1 << 19
"""Ids that an index holds; with their places they take 20 MB."""

_WORTH = 0.4
"""Least probability of a token that is drafted: about what one more token of a pass costs on a CPU,
relative to the token of a pass without drafts."""
_KEPT_BY_ALL, _KEPT_BY_ONE = 0.9995, 0.8  # Of the counts, at each token and at each pass.
_KINDS = MOST_AGREEMENT.bit_length() + 1  # Of places, by the magnitude of their agreement.


@dataclass(slots=True)
class _Rate:
    """How often tokens of a kind were right lately; a half before any was seen."""

    right: float = 1.0
    seen: float = 2.0

    @property
    def value(self) -> float:
        return self.right / self.seen

    def count(self, right: bool) -> None:
        self.right = self.right * _KEPT_BY_ALL + right
        self.seen = self.seen * _KEPT_BY_ALL + 1.0


@dataclass(slots=True)
class Drafting:
    """What drafts a sequence has.

    Attributes:
        text: Its ids in the index.
        draft: Ids of the next pass after the last sampled one; no longer than is left to sample.
    """

    text: DraftText
    draft: list[int] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)  # The draft, or one id to compare.
    kinds: list[int] = field(
        default_factory=list
    )  # Of what is expected, as indices of the drafter's rates.
    right: float = 0.0  # Decayed number of expected ids that were sampled.
    hoped: float = 0.0  # Decayed number of those that the rates promised.


class Drafter:
    """Proposes drafts, and counts how they did.

    Args:
        max_tokens: Maximum length of a draft.
        indexed_ids: Number of ids of earlier texts that it keeps.

    Attributes:
        num_drafted: Number of tokens that were drafted.
        num_accepted: Number of drafted tokens that were sampled.
    """

    def __init__(self, max_tokens: int, indexed_ids: int = INDEXED_IDS) -> None:
        self.max_tokens = max_tokens
        self.num_drafted = self.num_accepted = 0
        self._index = DraftIndex(indexed_ids)
        self._rates = [_Rate() for _ in range(len(ORDERS) * _KINDS)]

    def begin(self, ids: Ids[int], known: int) -> Drafting:
        """Enters a prompt.

        Args:
            known: Number of leading ids that an earlier sequence has entered.
        """
        return Drafting(self._index.open(ids, known))

    def propose(self, drafting: Drafting, room: int) -> None:
        """Sets the draft of the next pass.

        Args:
            room: Maximum length of the draft, in tokens.
        """
        drafting.draft, drafting.expected, drafting.kinds = [], [], []
        luck = min(1.0, (drafting.right + 1.0) / (drafting.hoped + 1.0))
        room = min(room, self.max_tokens)
        probability = 1.0
        context = drafting.text.ids[-ORDERS[0] :]
        while len(drafting.expected) < max(room, 1):
            best, kind, token_id = 0.0, 0, 0
            for order, predicted, agreement in self._index.predictions(context):
                its_kind = order * _KINDS + agreement.bit_length()
                rate = self._rates[its_kind].value
                if rate > best:
                    best, kind, token_id = rate, its_kind, predicted
            if not best:
                break
            probability *= best * luck
            if probability <= _WORTH and drafting.expected:
                break
            drafting.expected.append(token_id)
            drafting.kinds.append(kind)
            if probability <= _WORTH:
                break
            context.append(token_id)
            drafting.draft.append(token_id)
        del drafting.draft[max(room, 0) :]

    def observe(self, drafting: Drafting, sampled: Ids[int]) -> None:
        """Counts what a pass has sampled, and enters it.

        Args:
            sampled: Ids of the pass, at least one.
        """
        right = 0
        drafting.right *= _KEPT_BY_ONE
        drafting.hoped *= _KEPT_BY_ONE
        for expected, found, kind in zip(drafting.expected, sampled, drafting.kinds, strict=False):
            rate = self._rates[kind]
            drafting.hoped += rate.value
            rate.count(expected == found)
            if expected != found:
                break
            right += 1
        drafting.right += right
        if drafting.draft:
            self.num_drafted += len(drafting.draft)
            self.num_accepted += min(right, len(drafting.draft))
        self._index.extend(drafting.text, sampled)
