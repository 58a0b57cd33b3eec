"""Finds sentences of docstrings that hide what the code does: `check_docstrings.py FILE...`.

An entry below `Args:` or `Attributes:` is written only if it holds a unit, a range, the meaning of
None, an order or an ownership; else it is left out. So an entry of fewer than five words is a
finding, and one that begins with a word that has nothing to refer to, as "Of the run".

Code does not know, say, ask or tell: it stores, returns, requests, reports. A sentence with one of
these verbs is a finding, unless it names somebody who can: a model, a user, an agent, a judge.
Standard library only, any Python from 3.8: pants-plugins/prose imports this module.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

LEAST_WORDS = 5
BEGINNINGS = ("As", "Of", "That", "Those", "What")
_SPEECH = re.compile(r"\b(?:says?|said|saying|knows?|knew|known to|asks?|asked|tells?|told)\b")
_SPEAKERS = re.compile(
    r"\b(?:models?|users?|assistants?|agents?|judges?|judged?|players?|opponents?|teachers?|persona"
    r"|you|people|somebody|nobody|who|whoever)\b",
    re.IGNORECASE,
)
_CODE = re.compile(r"`[^`]*`")
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
    for line, sentence in _sentences(text.split("\n")):
        plain = _CODE.sub("", sentence)
        verb = _SPEECH.search(plain)
        if verb and not _SPEAKERS.search(plain):
            yield (
                f"{path}:{line}: {verb[0]!r} in {sentence!r}: name what the code does, such as "
                "stores, returns, requests, reports"
            )


def _sentences(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yields the line number and the text of each sentence of the docstrings."""
    inside, begun, at = False, "", 0
    for number, line in enumerate(lines, start=1):
        stripped = line.strip()
        opens = not inside and re.match(r'r?"""', stripped) is not None
        if not inside and not opens:
            continue
        words = re.sub(r'^r?"""|"""$', "", stripped)
        inside = not stripped.endswith('"""') or (opens and len(stripped) <= len('r"""'))
        if not words or not inside:
            pieces = [f"{begun} {words}".strip()]
            yield from ((at or number, piece) for piece in _split(pieces[0]))
            begun, at = "", 0
            continue
        begun, at = f"{begun} {words}".strip(), at or number


def _split(text: str) -> list[str]:
    return [piece for piece in re.split(r"(?<=[.;:])\s", text) if piece]


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
