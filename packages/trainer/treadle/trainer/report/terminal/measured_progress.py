"""Progress that Prometheus sees too: phase, trajectories that have not ended, and steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from treadle.trainer.report.metrics import Record
from treadle.trainer.report.prometheus import RunMetrics
from treadle.trainer.report.terminal.progress import Progress

__all__ = ["MeasuredProgress"]


class MeasuredProgress:
    """A display whose phases and steps are metrics of the run."""

    def __init__(self, display: Progress, metrics: RunMetrics) -> None:
        self._display = display
        self._metrics = metrics

    def note(self, text: str) -> None:
        """Shows the line."""
        self._display.note(text)

    @contextmanager
    def phase(self, name: str, *, total: int | None = None) -> Iterator[None]:
        """Shows and measures the phase."""
        self._metrics.begin_phase(name, total=total or 0)
        try:
            with self._display.phase(name, total=total):
                yield
        finally:
            self._metrics.end_phase()

    def advance(self, count: int = 1) -> None:
        """Shows and counts that parts of the phase are done."""
        self._display.advance(count)
        self._metrics.advance(count)

    def step_done(self, step: int, values: Record) -> None:
        """Shows and measures the step."""
        self._display.step_done(step, values)
        self._metrics.step_done(step, values)

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._display.__exit__(kind, error, tb)
