"""A run directory as the page sees it: its name, its state, its files and what is wrong with them.

Invariant: every request reads the files again, since a run may be writing, and nothing is written.
Whatever is missing or damaged is named in `problems`; what is there is shown all the same.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from treadle.tracing.trajectories import DIRECTORY, TrajectoryFiles
from treadle.tracing.trajectories.run_directories import CONFIG, METRICS, STATUS, name_runs
from treadle.tracing.viewer.token_text import TokenText

__all__ = ["Run", "open_runs"]

_NOTES: Final = "notes.jsonl"
_MAX_NOTES: Final = 500
_STATES: Final = ("running", "finished", "failed", "interrupted")


class Run:
    """One run directory.

    Args:
        directory: Where the run writes, or wrote.
        name: Unique among the runs of the page.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self.name = name
        self.trajectories = TrajectoryFiles(directory)

    def describe(self) -> dict[str, Any]:
        """Returns its name, state, notes, configuration and problems as plain data."""
        config, config_problem = _read_object(self.directory / CONFIG)
        status, status_problem = _read_object(self.directory / STATUS)
        problems = [problem for problem in (status_problem, config_problem) if problem]
        notes, damaged = _read_notes(self.directory / _NOTES)
        if damaged:
            problems.append(f"{_NOTES}: {damaged} damaged lines are left out")
        problems += self._missing()
        return {
            "name": self.name,
            "directory": str(self.directory),
            "state": self._state(status),
            "step": status.get("step"),
            "error": status.get("error"),
            "ends_at": status.get("ends_at"),
            "notes": notes,
            "config": config,
            "problems": problems,
        }

    @cached_property
    def token_text(self) -> TokenText | None:
        """The vocabulary of the model, if the run names a directory here that has one."""
        config, _ = _read_object(self.directory / CONFIG)
        model = config.get("model")
        path = model.get("path") if isinstance(model, dict) else None
        if not isinstance(path, str):
            return None
        try:
            return TokenText(Path(path) / "tokenizer.json")
        except (OSError, ValueError):
            return None  # Token ids are shown in the place of text.

    def _state(self, status: Mapping[str, Any]) -> str:
        state = status.get("state")
        if state == "running" and not _is_locked(self.directory / "lock"):
            return "killed"
        return state if state in _STATES else "unknown"

    def _missing(self) -> Iterator[str]:
        if not (self.directory / METRICS).is_file():
            yield f"{METRICS} is missing: there are no curves"
        if not (self.directory / DIRECTORY).is_dir():
            yield f"{DIRECTORY}/ is missing: there are no trajectories to show"
            return
        for name, damage in sorted(self.trajectories.damaged.items()):
            yield f"{DIRECTORY}/{name} is left out: {damage}"
        if left_out := self.trajectories.left_out:
            yield f"the run did not keep {left_out:,} trajectories: its budget for them was spent"


def open_runs(directories: list[Path]) -> list[Run]:
    """Returns the runs of some directories, each with a unique name.

    Raises:
        NotARunError: A directory is missing, has no file of a run, or is named twice.
    """
    return [Run(path, name) for path, name in name_runs(directories).items()]


def _read_object(path: Path) -> tuple[dict[str, Any], str | None]:
    """Returns the JSON object of a file, and what is wrong with it."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}, f"{path.name} is missing"
    except (OSError, RecursionError, ValueError) as error:
        return {}, f"{path.name} is damaged: {error}"
    if not isinstance(value, dict):
        return {}, f"{path.name} is damaged: it is not an object"
    return value, None


def _read_notes(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the last notes, and the number of damaged lines."""
    try:
        content = path.read_bytes()
    except OSError:
        return [], 0
    notes: list[dict[str, Any]] = []
    damaged = 0
    for line in content[: content.rfind(b"\n") + 1].splitlines():
        try:
            note = json.loads(line)
            notes.append({"step": int(note["step"]), "note": str(note["note"])})
        except (KeyError, OverflowError, RecursionError, TypeError, ValueError):
            damaged += 1
    return notes[-_MAX_NOTES:], damaged


def _is_locked(path: Path) -> bool:
    """Returns whether a trainer holds the run directory."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
