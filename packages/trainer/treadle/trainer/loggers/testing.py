"""Loggers that fail, for tests; each is named in `run.loggers` as module:Class."""

# ruff: noqa: D101, D102  -- the name of a class says what it does

import os
import threading
from collections.abc import Mapping

from treadle.trainer.loggers.run_logger import End, LoggedRun, Table

__all__ = [
    "Dies",
    "HangsAtAStep",
    "HangsAtStart",
    "HangsAtTheEnd",
    "RaisesAtAStep",
    "RaisesAtStart",
    "RaisesAtTheEnd",
    "Records",
    "brittle",
]


def brittle(name: str) -> str:
    """Returns what `run.loggers` names a class of this module by."""
    return f"{__name__}:{name}"


class Records:
    """Writes the records it gets to a file of the run directory, named after the class."""

    def __init__(self, run: LoggedRun) -> None:
        self._path = run.directory / f"{type(self).__name__}.txt"
        self._tell(f"start {run.project} {run.name} {run.resumed_after}")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the step and the values."""
        self._tell(f"metrics {step} {dict(values)}")

    def table(self, step: int, table: Table) -> None:
        """Writes the step and the size."""
        self._tell(f"table {step} {table.name} {len(table.columns)}x{len(table.rows)}")

    def finish(self, end: End, summary: Mapping[str, float]) -> None:
        """Writes the end."""
        self._tell(f"{end} {dict(summary)}")

    def _tell(self, text: str) -> None:
        with self._path.open("a") as file:
            file.write(text + "\n")


class RaisesAtStart(Records):
    def __init__(self, run: LoggedRun) -> None:
        raise ConnectionError("no account")


class HangsAtStart(Records):
    def __init__(self, run: LoggedRun) -> None:
        threading.Event().wait()


class RaisesAtAStep(Records):
    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        if step == 1:
            raise ConnectionError("no network")
        super().metrics(step, values)


class HangsAtAStep(Records):
    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        threading.Event().wait()


class Dies(Records):
    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        os._exit(3)


class RaisesAtTheEnd(Records):
    def finish(self, end: End, summary: Mapping[str, float]) -> None:
        raise SystemExit("over")


class HangsAtTheEnd(Records):
    def finish(self, end: End, summary: Mapping[str, float]) -> None:
        threading.Event().wait()
