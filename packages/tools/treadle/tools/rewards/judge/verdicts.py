"""Reads the verdict of a judgement: its last line, `Verdict: LABEL`.

Invariant: the label of a rubric and what the judge wrote are compared in one form, `plain`. What
`verdict` could not give back is no label.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["plain", "verdict"]

_VERDICT = re.compile(r"^[\W_]*verdict[\W_]*:(.*)$", re.IGNORECASE)
_MARKS = "*_`'\"\u2018\u2019\u201c\u201d\u201e\u00ab\u00bb()[]{} "
"""Markdown's marks, quotes and brackets. Other marks, as those of `C++`, belong to a label."""
_ENDS = ".,;:!?\u3002"


def plain(label: str) -> str:
    """Returns a label without case, and without marks and the end of a sentence around it."""
    return " ".join(label.split()).casefold().lstrip(_MARKS).rstrip(_MARKS + _ENDS)


def verdict(text: str, labels: Sequence[str]) -> str | None:
    """Returns the label in the last line of a judgement, `Verdict: LABEL`; None if there is none.

    Case and spaces do not matter, nor do Markdown's marks, quotes and brackets around a label.
    """
    lines = text.strip().splitlines()
    match = _VERDICT.match(lines[-1]) if lines else None
    if match is None:
        return None
    said = plain(match[1])
    return next((label for label in labels if plain(label) == said), None)
