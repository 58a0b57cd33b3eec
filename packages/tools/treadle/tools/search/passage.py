"""Passages from any source, and the text in which a model reads them.

Invariant: the text is verl's (`search_r1_like_utils.py`), character for character, so that models
trained on it see nothing new. A retriever answers all queries of a call or raises.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One piece of text.

    Attributes:
        contents: Its title in the first line, then its text, as in Search-R1's corpora.
        score: Larger fits the query better; comparable within one answer only.
    """

    contents: str
    score: float = 0.0


class Retriever(Protocol):
    """Finds passages."""

    async def retrieve(self, queries: Sequence[str], *, topk: int) -> list[list[Passage]]:
        """Returns at most `topk` passages per query, the best first.

        Raises:
            ConnectionError: The service cannot answer.
        """
        ...

    async def enter(self) -> None:
        """Opens what `retrieve` needs; each `enter` is ended by one `leave`.

        Raises:
            SetupError: A limit over processes cannot be kept here.
        """
        ...

    async def leave(self) -> None:
        """Frees what it holds, if nobody else uses it."""
        ...


def as_text(found: Sequence[Sequence[Passage]]) -> str:
    """Returns the answer to a call as the model reads it: JSON with one text under `result`."""
    result = "\n---\n".join(_numbered(passages) for passages in found) if found else ""
    return json.dumps({"result": result or "No search results found."}, ensure_ascii=False)


def _numbered(passages: Sequence[Passage]) -> str:
    blocks = []
    for number, passage in enumerate(passages, start=1):
        title, _, text = passage.contents.partition("\n")
        blocks.append(f"Doc {number} (Title: {title})\n{text}\n\n")
    return "".join(blocks).strip()
