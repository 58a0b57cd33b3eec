"""Ids of tool calls: unique in a session, not only in a turn.

Invariant: no id is given twice. Parsers number the calls of one turn; agents keep answers by id,
over all turns. An id that is taken is counted up where it ends in a number, its length kept, since
some templates insist on it.
"""

import re

_NUMBERED = re.compile(r"(.*?)(\d{0,9})", re.DOTALL)


class CallIds:
    """The ids of a session."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, wanted: str) -> str:
        """Returns the id, or the next one after it that is free."""
        while wanted in self._taken:
            match = _NUMBERED.fullmatch(wanted)
            assert match is not None
            head, digits = match.groups()
            wanted = f"{head}{int(digits or 0) + 1:0{len(digits)}}"
        self._taken.add(wanted)
        return wanted
