"""A BM25 index over a file of passages, in memory and in process (extra `search`).

Invariant: the same corpus and query give the same passages in the same order: BM25 in Lucene's form
(Robertson and Zaragoza, "The Probabilistic Relevance Framework", 2009) over lower-case words
without English stop words, stemmed by Porter's second stemmer; equal scores keep the file's order.
Passages that share no word with the query are not found.

Reading takes a while and happens once; a query runs on a worker thread.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bm25s
import numpy
import Stemmer

from treadle.agent_loop import SetupError
from treadle.tools.search.passage import Passage


class Bm25Index:
    """An index over passages.

    Args:
        contents: The passages, title in the first line; at least one.

    Raises:
        SetupError: They contain only stop words.
    """

    def __init__(self, contents: Sequence[str]) -> None:
        self._contents = tuple(contents)
        self._bm25: Any = bm25s.BM25(method="lucene")
        words = self._words(self._contents)
        if not any(words):
            raise SetupError("the corpus has no word to look for")
        self._bm25.index(words, show_progress=False)

    @classmethod
    def from_file(cls, path: Path) -> Bm25Index:
        """Reads a corpus: JSON lines with `contents`, or with `title` and `text`.

        Raises:
            SetupError: The file cannot be read, is empty or has an invalid line, which is named.
        """
        try:
            with path.open(encoding="utf-8") as file:
                lines = list(file)  # not splitlines: JSON may hold U+2028 as it is
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"cannot read the corpus {path}: {error}") from error
        contents = [_contents(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
        if not contents:
            raise SetupError(f"the corpus {path} is empty")
        return cls(contents)

    def __len__(self) -> int:
        return len(self._contents)

    async def retrieve(self, queries: Sequence[str], *, topk: int) -> list[list[Passage]]:
        """Returns at most `topk` passages per query, the best first."""
        return await asyncio.to_thread(self._retrieve, queries, topk)

    async def enter(self) -> None:
        """Nothing to open."""

    async def leave(self) -> None:
        """Nothing to free."""

    def _retrieve(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        found = []
        for words in self._words(queries):
            scores = self._bm25.get_scores(words) if words else numpy.zeros(len(self))
            found.append(
                [
                    Passage(contents=self._contents[place], score=float(scores[place]))
                    for place in _best(scores, topk)
                ]
            )
        return found

    def _words(self, texts: Sequence[str]) -> list[list[str]]:
        words: list[list[str]] = bm25s.tokenize(
            list(texts),
            stopwords="en",
            stemmer=Stemmer.Stemmer("english"),  # each thread its own
            return_ids=False,
            show_progress=False,
        )
        return words


def _best(scores: Any, topk: int) -> list[int]:
    """Places of the largest scores above 0; equal ones in their order."""
    places = numpy.flatnonzero(scores > 0)
    if len(places) > topk:
        least = numpy.partition(scores[places], -topk)[-topk]
        places = places[scores[places] >= least]
    order = numpy.argsort(-scores[places], kind="stable")[:topk]
    best: list[int] = places[order].tolist()
    return best


def _contents(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise SetupError(f"{where} is not JSON: {error}") from error
    match entry:
        case {"contents": str(contents)}:
            return contents
        case {"title": str(title), "text": str(text)}:
            return f"{title}\n{text}"
    raise SetupError(
        f"{where} has neither a string `contents` nor strings `title` and `text`: {line[:80]}"
    )
