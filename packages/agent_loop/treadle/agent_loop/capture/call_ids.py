"""Ids of tool calls that are unique in a session.

Invariant: no id is given twice. Parsers only number the calls of one turn, but agents look up
answers by id, over all turns. If an id is taken, the number at its end is incremented; its length
is kept, because some templates require it.
"""

import re

_NUMBERED = re.compile(r"(.*?)(\d{0,9})", re.DOTALL)


class CallIds:
    """The ids of one session."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, wanted: str) -> str:
        """Returns the id, or the next free one after it."""
        while wanted in self._taken:
            match = _NUMBERED.fullmatch(wanted)
            assert match is not None
            head, digits = match.groups()
            wanted = f"{head}{int(digits or 0) + 1:0{len(digits)}}"
        self._taken.add(wanted)
        return wanted
