"""The notes of a run: `notes.jsonl`, one {"step", "note"} per thing that was said about a step.

Invariant: as for the metrics log, a run that resumes after step s removes later lines.
"""

import json
from pathlib import Path

from treadle.trainer.report.terminal.lines import keep_lines

__all__ = ["NotesLog"]


class NotesLog:
    """Appends to `path`, which is created with its directory.

    Args:
        path: The file.
        resume_after: As for `MetricsLog`; None begins a new file.
    """

    def __init__(self, path: Path, *, resume_after: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_after is not None:
            keep_lines(path, resume_after)
        else:
            path.unlink(missing_ok=True)
        self._path = path

    def append(self, step: int, note: str) -> None:
        """Writes one note.

        Raises:
            OSError: The disk is full or gone.
        """
        line = json.dumps({"step": step, "note": note}, ensure_ascii=False)
        with self._path.open("ab") as file:
            file.write(line.encode(errors="backslashreplace") + b"\n")
