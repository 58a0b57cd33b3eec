"""Finds words that docs/vocabulary.md asks not to use: `check_vocabulary.py FILE...`.

The words are those in backticks in the first column of the last table of that page. A lower-case
word is found in singular and plural, alone or as a part of a name, and its `-` also stands for `_`
or nothing. A name with a capital letter is found as it is written. Standard library only, any
Python from 3.8: pants-plugins/prose imports this module.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

PAGE = "docs/vocabulary.md"
SECTION = "## Words we do not use"


class Vocabulary:
    """The words of a page that are not used, and what to say instead."""

    def __init__(self, page: str) -> None:
        """Reads the table.

        Raises:
            ValueError: The page has no such table.
        """
        rows = re.findall(r"^\| (`.*?) \| (.*) \|$", page.partition(SECTION)[2], re.MULTILINE)
        self._instead = {word: say for cell, say in rows for word in re.findall("`(.+?)`", cell)}
        if not self._instead:
            raise ValueError(f"{PAGE} has no table of words below '{SECTION}'")
        self._patterns = {word: re.compile(_pattern(word)) for word in self._instead}

    def findings(self, path: str, text: str) -> Iterator[str]:
        """Yields `path:line: what to say instead` for each word found in a text."""
        if path == PAGE or path.endswith("CHANGELOG.md"):
            return
        letters = text.lower()
        for word, pattern in self._patterns.items():
            # Most files have none of the words, and a plain search is much faster than a pattern.
            if word.lower().partition("-")[0] not in letters:
                continue
            for match in pattern.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                yield f"{path}:{line}: '{match.group()}': say {self._instead[word]} ({PAGE})"


def _pattern(word: str) -> str:
    if word != word.lower():
        return rf"\b{re.escape(word)}\b"
    parts = word.split("-")
    small = "[-_]?".join(map(re.escape, parts))
    capital = "[-_]?".join(f"[{p[0]}{p[0].upper()}]{re.escape(p[1:])}" for p in parts)
    # In a name of several words each begins with a capital letter or after an underscore.
    return rf"(?:(?<![A-Za-z]){small}|(?=[A-Z]){capital})s?(?![a-z])"


def main(argv: list[str]) -> int:
    """Prints what was found in the files; returns the exit status."""
    vocabulary = Vocabulary(Path(PAGE).read_text(encoding="utf-8"))
    found = [
        finding
        for path in argv
        for finding in vocabulary.findings(path, Path(path).read_text(encoding="utf-8"))
    ]
    print("\n".join(found) if found else f"{len(argv)} files use the vocabulary of {PAGE}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
