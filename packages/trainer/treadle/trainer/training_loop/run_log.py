"""The log of our modules, which a run leaves beside its results."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

from treadle.tracing.inert import InertFormatter
from treadle.trainer.report import Progress

__all__ = ["run_log"]

_log = logging.getLogger(__name__)


class _Notes(logging.Handler):
    """Shows warnings in the progress display, but not the error that the command will report."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != __name__:
            self._progress.note(record.getMessage())


class _LogFile(logging.FileHandler):
    """Says once, instead of with a trace for each line, that the log cannot be written."""

    def __init__(self, path: Path, progress: Progress) -> None:
        super().__init__(path, encoding="utf-8")
        self._progress = progress
        self._said = False

    def handleError(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            self._progress.note(f"{self.baseFilename} is not complete: {error.strerror}")

    def close(self) -> None:
        """See `logging.Handler`."""
        with contextlib.suppress(OSError):  # It was said, and would hide what ended the run.
            super().close()


@contextlib.contextmanager
def run_log(path: Path, progress: Progress) -> Iterator[None]:
    """Sends the log of `treadle` to a file, and its warnings to the display too.

    What ends the run is logged with its traceback.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = _LogFile(path, progress)
    to_file.setFormatter(InertFormatter())
    handlers = [to_file, _Notes(progress)]
    ours = logging.getLogger("treadle")
    level, propagate = ours.level, ours.propagate
    ours.setLevel(logging.INFO)
    ours.propagate = False
    for handler in handlers:
        ours.addHandler(handler)
    try:
        yield
    except Exception as error:
        _log.error("the run failed: %s", error, exc_info=True)
        raise
    except BaseException:
        _log.info("the run was interrupted")
        raise
    else:
        _log.info("the run ended")
    finally:
        for handler in handlers:
            ours.removeHandler(handler)
        to_file.close()
        ours.setLevel(level)
        ours.propagate = propagate
