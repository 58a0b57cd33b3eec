"""All loggers of a run, beside its own files."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from treadle.trainer.config.logger_names import ALWAYS, short_name
from treadle.trainer.config.sft import AnyConfig
from treadle.trainer.loggers.logger_process import LoggerProcess
from treadle.trainer.loggers.run_logger import End, Table
from treadle.trainer.loggers.secrets import without_secrets
from treadle.trainer.report.warning_signs import Alert

__all__ = ["AFTER_CANCEL_S", "Loggers", "open_loggers", "run_id"]

AFTER_CANCEL_S: Final = 10.0
"""Maximum seconds for the loggers of a run that was interrupted."""


@dataclass(frozen=True, slots=True)
class Loggers:
    """Gives everything to each logger; no method waits or raises."""

    processes: Sequence[LoggerProcess] = ()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Gives the metrics of a step."""
        self._put({"kind": "metrics", "step": step, "values": dict(values)})

    def table(self, step: int, table: Table) -> None:
        """Gives a table of a step."""
        self._put(
            {
                "kind": "table",
                "step": step,
                "name": table.name,
                "columns": list(table.columns),
                "rows": [list(row) for row in table.rows],
            }
        )

    def alert(self, step: int, alert: Alert) -> None:
        """Gives an alert of a step to the loggers that take alerts."""
        self._put({"kind": "alert", "step": step, "name": alert.name, "text": alert.text})

    def _put(self, record: Mapping[str, Any]) -> None:
        for process in self.processes:
            process.put(record)


@asynccontextmanager
async def open_loggers(
    config: AnyConfig,
    run_dir: Path,
    *,
    resumed_after: int | None,
    summary: Callable[[], Mapping[str, float]],
) -> AsyncIterator[Loggers]:
    """Yields the loggers of the configuration, and reports to them how the block ended.

    Args:
        summary: Returns the metrics to report at the end.
    """
    names = [name for name in config.run.loggers if name not in ALWAYS]
    if not names:
        yield Loggers()
        return
    run = {
        "id": run_id(run_dir),
        "project": config.run.project,
        "name": config.run.name,
        "directory": str(run_dir),
        "config": without_secrets(config.model_dump(mode="json")),
        "resumed_after": resumed_after,
    }
    limit = config.run.loggers_timeout_s
    processes = []
    for name in names:
        short = short_name(name)
        hello = {
            "logger": name,
            "run": run,
            "taken": str(run_dir / "loggers" / f"{short}.json"),
            "deadline_s": limit,
        }
        log_path = run_dir / "logs" / f"logger-{short}.log"
        processes.append(LoggerProcess(short, hello, log_path=log_path))

    async def close(end: End, deadline_s: float) -> None:
        record = {"kind": "finish", "end": end, "summary": dict(summary())}
        await asyncio.gather(
            *(asyncio.to_thread(each.close, record, deadline_s) for each in processes)
        )

    try:
        yield Loggers(processes)
    except asyncio.CancelledError:
        await close("interrupted", min(limit, AFTER_CANCEL_S))
        raise
    except BaseException:
        await close("failed", limit)
        raise
    await close("finished", limit)


def run_id(run_dir: Path) -> str:
    """Returns the run's id for loggers and traces, which is made once per run directory."""
    path = run_dir / "loggers" / "run_id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(secrets.token_hex(4))
        partial.replace(path)
    return path.read_text().strip()
