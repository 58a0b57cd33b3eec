"""The interface of a logger, and the data it gets, which are plain: they go to another process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

__all__ = ["End", "LoggedRun", "RunLogger", "Table", "TakesAlerts"]

End = Literal["finished", "failed", "interrupted"]
"""How a run ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """The run that is logged.

    Attributes:
        id: Identity of the run directory: the same whenever the run is resumed.
        config: The resolved configuration without its secrets, nested as in `config.json`.
        resumed_after: The last step that a resumed run keeps; -1: none; None: the run is new.
    """

    id: str
    project: str
    name: str
    directory: Path
    config: Mapping[str, Any]
    resumed_after: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of one step.

    Attributes:
        rows: One value per column: text, a number, or None.
    """

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]


class RunLogger(Protocol):
    """A logger of one run. It is made as `Class(run)` with a `LoggedRun`, in a separate process.

    Whatever a method raises loses that one record; the run continues.
    """

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the metrics of a step; steps increase. A value may be NaN."""
        ...

    def table(self, step: int, table: Table) -> None:
        """Takes a table of a step."""
        ...

    def finish(self, end: End, summary: Mapping[str, float]) -> None:
        """Takes the end of the run, and writes what is not yet written."""
        ...


@runtime_checkable
class TakesAlerts(Protocol):
    """The method that a logger has beside those of `RunLogger` if its service shows alerts."""

    def alert(self, step: int, name: str, text: str) -> None:
        """Takes an alert of a step; `name` is that of its rule."""
        ...
