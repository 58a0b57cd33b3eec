"""Progress that is also logged: what the console shows stays in `logs/trainer.log`."""

import logging
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from treadle.trainer.report.metrics import Record
from treadle.trainer.report.terminal.progress import Progress, step_line

__all__ = ["LoggedProgress"]

_log = logging.getLogger(__name__)


class LoggedProgress:
    """A display whose notes and steps are logged too.

    Args:
        total_steps: The last step of the run.
    """

    def __init__(self, display: Progress, *, total_steps: int) -> None:
        self._display = display
        self._total = total_steps

    def note(self, text: str) -> None:
        """Shows and logs the line."""
        self._display.note(text)
        _log.info("%s", text)

    def phase(self, name: str, *, total: int | None = None) -> AbstractContextManager[None]:
        """Shows the phase."""
        return self._display.phase(name, total=total)

    def advance(self, count: int = 1) -> None:
        """Shows that parts of the phase are done."""
        self._display.advance(count)

    def step_done(self, step: int, values: Record) -> None:
        """Shows and logs the line of the step."""
        self._display.step_done(step, values)
        _log.info("%s", step_line(step, self._total, values))

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
