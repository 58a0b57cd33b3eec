"""The rewards of HotpotQA: exact match and F1 over words, of the answer in <answer> tags.

Invariant: `em` is what verl's `search_r1_like_qa_em.py` gives, `f1` the official measure
(Yang et al., "HotpotQA", 2018, `hotpot_evaluate_v1.py`): yes, no and noanswer match as a whole or
not at all. Of several accepted answers the best counts. A text without the tags gives 0; one with
more than ten of them a quarter, so that answering many times does not pay (Search-R1).
Pure functions of strings.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal, get_args

Mode = Literal["em", "f1"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)

_OPEN, _CLOSE = "<answer>", "</answer>"
_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
_WHOLE: Final = frozenset({"yes", "no", "noanswer"})
_MANY_TAGS = 10


def extract(text: str) -> str | None:
    """Returns the last answer in <answer> tags; None if there is none."""
    answer, place = None, 0
    # Not by a pattern, which looks for the end again from each of a thousand tags left open.
    while (start := text.find(_OPEN, place)) >= 0:
        start += len(_OPEN)
        stop = text.find(_CLOSE, start)
        if stop < 0:
            break
        answer, place = text[start:stop].strip(), stop + len(_CLOSE)
    return answer


def normalise(answer: str) -> str:
    """Returns an answer in lower case, without punctuation, articles and double spaces."""
    plain = answer.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def f1(answer: str, truth: str) -> float:
    """Harmonic mean of precision and recall over the words of two normalised answers."""
    if answer != truth and {answer, truth} & _WHOLE:
        return 0.0
    given, wanted = answer.split(), truth.split()
    common = (Counter(given) & Counter(wanted)).total()
    return 2 * common / (len(given) + len(wanted)) if common else 0.0


def score(text: str, ground_truths: Sequence[str], *, mode: Mode = "em") -> float:
    """Returns the reward of `text` against the accepted answers, in [0, 1]."""
    answer = extract(text)
    if answer is None:
        return 0.0
    given = normalise(answer)
    truths = [normalise(truth) for truth in ground_truths]
    best = float(given in truths) if mode == "em" else max(f1(given, truth) for truth in truths)
    if max(text.count(_OPEN), text.count(_CLOSE)) > _MANY_TAGS:
        return best / 4
    return best
