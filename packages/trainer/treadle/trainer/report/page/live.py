"""Keeps the report of a run up to date while it runs, and states at its top how it ended.

Invariant: the report never ends or delays a run: it is written in a separate thread, one at a time,
and its failures are logged. The last one is complete before the run returns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from treadle.trainer.report.metrics import SAVE_S, VALIDATE_S, Record
from treadle.trainer.report.pace import Pace
from treadle.trainer.report.page.files import REPORT, write_page, write_reports
from treadle.trainer.report.status import STATUS, Status, running, write_status

_log = logging.getLogger(__name__)
# matplotlib keeps its fonts open for each thread that has drawn, and a process may have many runs.
_DRAWING = ThreadPoolExecutor(1, thread_name_prefix="draw the report")


class LiveReport:
    """Writes the report and `status.json` of a run."""

    def __init__(self, run_dir: Path, *, pace: Pace | None = None, curves: bool = True) -> None:
        self._run_dir = run_dir
        self._pace = pace
        self._curves = curves
        self._writing: asyncio.Task[None] | None = None
        self._outdated = False

    def step_done(
        self, step: int, values: Record, *, busy: Mapping[str, float] | None = None
    ) -> None:
        """Writes into `status.json` that a step has ended, and when the run will end.

        The report follows after a validation and after a checkpoint.
        """
        expected = None if self._pace is None else self._pace.step_done(step, values)
        try:
            write_status(self._run_dir, running(step, expected, busy))
        except OSError as error:
            _log.warning("%s was not written: %s", self._run_dir / STATUS, error)
        if not values.keys().isdisjoint((VALIDATE_S, SAVE_S)):
            self.update()

    def update(self) -> None:
        """Rewrites the report soon: now, or after the one that is being written."""
        self._outdated = True
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def end(self, status: Status) -> None:
        """Rewrites the report a last time, with the state in which the run ended."""
        self._outdated = False
        if self._writing is not None:
            await self._writing
        work = partial(_write, self._run_dir, status, curves=self._curves)
        await asyncio.get_running_loop().run_in_executor(_DRAWING, work)

    async def _write(self) -> None:
        while self._outdated:
            self._outdated = False
            await asyncio.to_thread(_write, self._run_dir, None, curves=False)


@asynccontextmanager
async def live_report(
    run_dir: Path, *, pace: Pace | None = None, curves: bool = True
) -> AsyncIterator[LiveReport]:
    """Yields the report of the run, and records how the block ended; the caller has the lock.

    Args:
        pace: Estimates the end of the run. None: no estimate.
        curves: Whether `curves.png` is drawn at the end.
    """
    report = LiveReport(run_dir, pace=pace, curves=curves)
    await asyncio.to_thread(_write, run_dir, Status(state="running"), curves=False)
    try:
        yield report
    except asyncio.CancelledError:
        await report.end(Status(state="interrupted"))
        raise
    except Exception as error:
        text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        await report.end(Status(state="failed", error=text))
        raise
    await report.end(Status(state="finished"))


def _write(run_dir: Path, status: Status | None, *, curves: bool) -> None:
    try:
        if status is not None:
            write_status(run_dir, status)
        if curves:
            write_reports(run_dir)
        else:
            ended = status is not None and status.state != "running"
            write_page(run_dir, run_dir / REPORT, in_brief=not ended)
    except Exception as error:  # the run is worth more than its report
        _log.warning("the report of %s was not written: %s", run_dir, error, exc_info=True)
