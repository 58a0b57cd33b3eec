"""Collects what is wrong with rows: each problem once, with the first row that has it."""

from __future__ import annotations

import re

from treadle.trainer.data.errors import DataError
from treadle.trainer.problems import Problems

_MAX_SHOWN = 5  # different problems of the same rows
# What a message says of one row alone: a value, or the number of its task.
_VALUES = re.compile(r"\bgot .*?(?=, for the reward |; |$)|^task '[^']*': ", re.DOTALL)


class RowProblems:
    """Problems by their kind, which is their text without values, with the places of their rows.

    Args:
        rows: Name of the rows in messages, as "train rows".
    """

    def __init__(self, rows: str) -> None:
        self._rows = rows
        self._found: dict[str, tuple[str, Exception | None, list[str]]] = {}

    def add(self, place: str, problem: str, cause: Exception | None = None) -> None:
        """Adds a problem of one row.

        Args:
            place: The row's file and line.
            problem: The problem's text; rows whose texts differ in a value alone are counted
                together.
            cause: The error that reported the problem.
        """
        kind = _VALUES.sub("", problem)
        self._found.setdefault(kind, (problem, cause, []))[2].append(place)

    def raise_if_any(self) -> None:
        """Raises what was found.

        Raises:
            DataError: There is one problem.
            SeveralProblems: There are more.
        """
        problems = Problems(DataError)
        for problem, cause, places in list(self._found.values())[:_MAX_SHOWN]:
            others = len(places) - 1
            more = f" (and {others} more {self._rows})" if others else ""
            error = DataError(f"{places[0]}: {problem}{more}")
            error.__cause__ = cause
            problems.add(error)
        if (rest := len(self._found) - _MAX_SHOWN) > 0:
            problems.add(DataError(f"{self._rows} have {rest} more problems"))
        problems.raise_if_any()
