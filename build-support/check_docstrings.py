"""Finds entries of docstrings that say nothing: `check_docstrings.py FILE...`.

An entry below `Args:` or `Attributes:` is written only if it holds a unit, a range, the meaning of
None, an order or an ownership; else it is left out. So an entry of fewer than five words is a
finding, and one that begins with a word that has nothing to refer to, as "Of the run".
Standard library only, any Python from 3.8: pants-plugins/prose imports this module.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

LEAST_WORDS = 5
BEGINNINGS = ("As", "Of", "That", "Those", "What")
_SECTION = re.compile(r"^( *)(Args|Attributes):$")
_ENTRY = re.compile(r"^ *[\w*`, ]+?(?: \([^)]*\))?:(?: (?P<text>.*))?$")


def findings(path: str, text: str) -> Iterator[str]:
    """Yields `path:line: what is wrong` for each such entry of a module."""
    for line, entry in _entries(text.split("\n")):
        if len(entry.split()) < LEAST_WORDS:
            yield (
                f"{path}:{line}: the entry {entry!r} has fewer than {LEAST_WORDS} words: say its "
                "unit, range, order, owner or what None means, or leave it out"
            )
        elif entry.split()[0] in BEGINNINGS:
            yield f"{path}:{line}: the entry {entry!r} begins without a noun: name the thing"


def _entries(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yields the line number and the text of each entry."""
    section = indent = None  # the columns of the section's name and of its entries
    begun: list[str] = []
    at = 0
    for number, line in enumerate([*lines, ""], start=1):
        column = len(line) - len(line.lstrip())
        found = _SECTION.match(line)
        ends = section is not None and bool(line.strip()) and column <= section
        if begun and (ends or not line.strip() or column == indent):
            yield at, " ".join(begun)
            begun = []
        if found or ends:
            section, indent = (len(found[1]) if found else None), None
        elif section is not None and line.strip():
            indent = column if indent is None else indent
            entry = _ENTRY.match(line)
            if column == indent and entry:
                begun, at = [entry["text"] or ""], number
            elif begun:
                begun.append(line.strip())


def main(argv: list[str]) -> int:
    """Prints what was found in the files; returns the exit status."""
    found = [each for path in argv for each in findings(path, Path(path).read_text("utf-8"))]
    print("\n".join(found) if found else f"the docstrings of {len(argv)} files say something")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
