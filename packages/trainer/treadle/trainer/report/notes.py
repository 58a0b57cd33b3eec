"""The notes and the alerts of a run: `notes.jsonl` and `alerts.jsonl`.

Each note of a step is one line {"step", "note"}; each alert that was reported is one line {"step",
"name", "text"}.

Invariant: as for the metrics log, a run that resumes after step s removes later lines. An alert is
in both: among the notes for people, and under its name for programs.
"""

import json
from pathlib import Path

from treadle.trainer.report.terminal.lines import keep_lines
from treadle.trainer.report.warning_signs import Alert

__all__ = ["AlertLog", "NotesLog"]


class _Lines:
    def __init__(self, path: Path, *, resume_after: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_after is not None:
            keep_lines(path, resume_after)
        else:
            path.unlink(missing_ok=True)
        self._path = path

    def _append(self, **line: object) -> None:
        text = json.dumps(line, ensure_ascii=False)
        with self._path.open("ab") as file:
            file.write(text.encode(errors="backslashreplace") + b"\n")


class NotesLog(_Lines):
    """Appends to `path`, which is created with its directory.

    Args:
        resume_after: See `MetricsLog`; None begins a new file.
    """

    def append(self, step: int, note: str) -> None:
        """Writes one note.

        Raises:
            OSError: The disk is full or gone.
        """
        self._append(step=step, note=note)


class AlertLog(_Lines):
    """Appends to `path`, which is created with its directory; arguments as of `NotesLog`."""

    def append(self, step: int, alert: Alert) -> None:
        """Writes one alert.

        Raises:
            OSError: The disk is full or gone.
        """
        self._append(step=step, name=alert.name, text=alert.text)
