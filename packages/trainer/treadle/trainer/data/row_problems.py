"""Collects what is wrong with rows: each problem once, with the first row that has it."""

from __future__ import annotations

from treadle.trainer.data.errors import DataError
from treadle.trainer.problems import Problems

_MAX_SHOWN = 5  # different problems of the same rows


class RowProblems:
    """Problems by their text, with the places of their rows.

    Args:
        rows: What the rows are called in messages, as "train rows".
    """

    def __init__(self, rows: str) -> None:
        self._rows = rows
        self._places: dict[str, list[str]] = {}
        self._causes: dict[str, Exception | None] = {}

    def add(self, place: str, problem: str, cause: Exception | None = None) -> None:
        """Adds a problem of one row.

        Args:
            place: The row's file and line.
            problem: What is wrong; rows with one text are counted together.
            cause: The error that said so.
        """
        self._places.setdefault(problem, []).append(place)
        self._causes.setdefault(problem, cause)

    def raise_if_any(self) -> None:
        """Raises what was found.

        Raises:
            DataError: There is one problem.
            SeveralProblems: There are more.
        """
        problems = Problems(DataError)
        for problem, places in list(self._places.items())[:_MAX_SHOWN]:
            others = len(places) - 1
            more = f" (and {others} more {self._rows})" if others else ""
            error = DataError(f"{places[0]}: {problem}{more}")
            error.__cause__ = self._causes[problem]
            problems.add(error)
        if (rest := len(self._places) - _MAX_SHOWN) > 0:
            problems.add(DataError(f"{self._rows} have {rest} more problems"))
        problems.raise_if_any()
