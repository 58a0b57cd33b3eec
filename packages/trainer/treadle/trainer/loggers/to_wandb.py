"""Weights & Biases; WANDB_MODE, WANDB_ENTITY and WANDB_BASE_URL select the destination.

Its files are in `wandb/` of the run directory.
"""

from collections.abc import Mapping
from typing import Final

from treadle.trainer.loggers.run_logger import End, LoggedRun, Table

__all__ = ["Logger"]

_STATUS: Final[Mapping[str, int]] = {"finished": 0, "failed": 1, "interrupted": 130}


class Logger:
    """See `RunLogger`."""

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        self._table = wandb.Table
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.directory),
            config=dict(run.config),
            # The log of the run is in its directory; this process has only the client's own.
            settings=wandb.Settings(console="off", disable_git=True, save_code=False),
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See `RunLogger`."""
        self._run.log(dict(values), step=step, commit=True)

    def table(self, step: int, table: Table) -> None:
        """Adds the table to the step's row, which its metrics complete."""
        rows = [list(row) for row in table.rows]
        self._run.log({table.name: self._table(columns=list(table.columns), data=rows)}, step=step)

    def alert(self, step: int, name: str, text: str) -> None:
        """See `TakesAlerts`; W&B shows it with the run, and notifies you as set in your account."""
        self._run.alert(title=name, text=f"step {step}: {text}", level="WARN", wait_duration=0)

    def finish(self, end: End, summary: Mapping[str, float]) -> None:
        """See `RunLogger`."""
        self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})
        self._run.finish(exit_code=_STATUS[end])
