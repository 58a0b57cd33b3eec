"""Drafts: tokens that a pass of the model reads before it is known that they are sampled.

A pass reads the last token of a sequence and its draft, and the sampler draws a token in each of
their places. A draw is a function of the seed, the position and the distribution, so the draws up
to and with the first one that differs from the draft are those of a run without drafts; what
follows is dropped. A poor draft costs time, and changes nothing.

A draft is what followed the same n-gram before: in the session's own context, in other samples of
its prompt, in earlier rollouts of the row. Their text is all in one index (`DraftIndex`), which
outlives requests and weights.

The length of a draft is what pays. A token is drafted as long as the probability that it is
accepted exceeds `_WORTH`. It is estimated by how often tokens after n-grams of this order were
right, in all sequences and in this one. A sequence without a draft still compares one token, so
the estimates remain true where nothing is drafted.
"""

import math
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from treadle.rollout_server.engines.torch.draft_index import ORDERS, DraftIndex, DraftText

INDEXED_IDS = 1 << 19
"""Ids that an index holds; with their places they take 18 MB."""

_WORTH = 0.4
"""Least probability of a token that is drafted: about what one more token of a pass costs on a CPU,
relative to the token of a pass without drafts."""
_KEPT_BY_ALL, _KEPT_BY_ONE = 0.999, 0.8  # Of the counts, at each pass of a sequence.
_PRIOR = 4.0  # Weight of the rate of all sequences, in tokens, beside the counts of one.


@dataclass(slots=True)
class _Rate:
    """Decayed numbers of tokens that were right and wrong."""

    right: float
    wrong: float

    def count(self, right: int, wrong: int, kept: float) -> None:
        self.right = self.right * kept + right
        self.wrong = self.wrong * kept + wrong


@dataclass(slots=True)
class Drafting:
    """What drafts a sequence has.

    Attributes:
        text: Its ids in the index.
        draft: Ids of the next pass after the last sampled one; no longer than is left to sample.
    """

    text: DraftText
    draft: list[int] = field(default_factory=list)
    expected: Ids[int] = ()  # The draft, or one id that is compared only.
    order: int = 0
    rate: _Rate = field(default_factory=lambda: _Rate(0.0, 0.0))


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
        self._rates = [_Rate(1.0, 1.0) for _ in ORDERS]

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
        drafting.draft, drafting.expected = [], ()
        found = self._index.find(drafting.text)
        if found is None:
            return
        drafting.order, held, place = found
        length = min(self._worthwhile(drafting), room)
        drafting.expected = held.ids[place : place + max(length, 1)]
        if length:
            drafting.draft = list(drafting.expected)

    def observe(self, drafting: Drafting, sampled: Ids[int]) -> None:
        """Counts what a pass has sampled, and enters it.

        Args:
            sampled: Ids of the pass, at least one.
        """
        right = 0
        for expected, found in zip(drafting.expected, sampled, strict=False):
            if expected != found:
                break
            right += 1
        compared = min(len(drafting.expected), len(sampled))
        if compared:
            wrong = int(right < compared)
            self._rates[drafting.order].count(right, wrong, _KEPT_BY_ALL)
            drafting.rate.count(right, wrong, _KEPT_BY_ONE)
        if drafting.draft:
            self.num_drafted += len(drafting.draft)
            self.num_accepted += min(right, len(drafting.draft))
        self._index.extend(drafting.text, sampled)

    def _worthwhile(self, drafting: Drafting) -> int:
        """Returns how many tokens pay, if each is right with the same probability."""
        of_all, of_one = self._rates[drafting.order], drafting.rate
        rate = of_all.right / (of_all.right + of_all.wrong)
        seen = of_one.right + of_one.wrong
        probability = (of_one.right + _PRIOR * rate) / (seen + _PRIOR)
        if probability <= _WORTH:
            return 0
        if probability >= 1.0:
            return self.max_tokens
        return min(self.max_tokens, int(math.log(_WORTH) / math.log(probability)))
