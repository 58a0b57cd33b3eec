"""TensorBoard's event files in `tensorboard/` of the run directory, written without torch.

A resumed run records the step at which it continues (`purge_step`), so that TensorBoard drops the
repeated steps from the earlier files.
"""

import json
import sys
import time
from collections.abc import Mapping

from treadle.trainer.loggers.run_logger import End, LoggedRun, Table

__all__ = ["Logger"]


class Logger:
    """See `RunLogger`."""

    overwrites_steps = True

    def __init__(self, run: LoggedRun) -> None:
        # It imports torch where it is installed, which takes seconds; here it needs none.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        from tensorboardX import SummaryWriter

        # Without a later step the viewer would drop nothing of a run that begins again.
        purge = None if run.resumed_after is None else run.resumed_after + 1
        # tensorboardX names a file by the second and truncates one that is there: a run that is
        # resumed within a second would lose its first file.
        self._writer = SummaryWriter(
            str(run.directory / "tensorboard"),
            purge_step=purge,
            filename_suffix=f".{time.time_ns()}",
        )
        if run.resumed_after is None:
            text = json.dumps(run.config, indent=2)
            self._writer.add_text("config", f"```json\n{text}\n```", 0)
        self._writer.flush()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See `RunLogger`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(self, step: int, table: Table) -> None:
        """Writes the table as text, in Markdown."""
        lines = [table.columns, ["--"] * len(table.columns), *table.rows]
        text = "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)
        self._writer.add_text(table.name, text, step)
        self._writer.flush()

    def alert(self, step: int, name: str, text: str) -> None:
        """Writes the alert as text."""
        self._writer.add_text(f"alerts/{name}", text, step)
        self._writer.flush()

    def finish(self, end: End, summary: Mapping[str, float]) -> None:
        """Writes how the run ended, with its summary, as text."""
        lines = (f"- {name}: {value:g}" for name, value in summary.items())
        self._writer.add_text("summary", "\n".join([end, "", *lines]), 0)
        self._writer.close()


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")
