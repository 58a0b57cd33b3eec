"""Trackio, which keeps runs on this machine.

TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL set another place. Trackio identifies a run by
its name, so the name ends with the run's id.
"""

from collections.abc import Mapping

from treadle.trainer.loggers.run_logger import End, LoggedRun, Table

__all__ = ["Logger"]


class Logger:
    """See `RunLogger`."""

    def __init__(self, run: LoggedRun) -> None:
        import trackio

        self._table = trackio.Table
        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.id}",
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See `RunLogger`."""
        self._run.log(dict(values), step=step)

    def table(self, step: int, table: Table) -> None:
        """See `RunLogger`."""
        rows = [list(row) for row in table.rows]
        self._run.log({table.name: self._table(columns=list(table.columns), data=rows)}, step=step)

    def alert(self, step: int, name: str, text: str) -> None:
        """See `TakesAlerts`."""
        self._run.alert(title=name, text=text, step=step)

    def finish(self, end: End, summary: Mapping[str, float]) -> None:
        """Writes what is not yet written; Trackio has no place for a summary."""
        self._run.finish()
