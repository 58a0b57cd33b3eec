"""Logs: one line per event on standard error, as text or as JSON.

Invariant: in the JSON format every line that Python writes is an object with `time`, `level`,
`logger` and `message`, including uncaught exceptions. A line that is written during a call has
the ids of that call (`request_id`, `session_id`, `update_id`), because tasks inherit them from
the task that started them.
"""

import json
import logging
import sys
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal

from treadle.tracing.inert import InertFormatter

_FIELDS = ("request_id", "session_id", "update_id")
_request: ContextVar[object] = ContextVar("request", default=None)


def name_call(request: object) -> None:
    """Adds the ids of a request to the log lines of this task and of the tasks it starts.

    Args:
        request: A message with any of the fields `request_id`, `session_id` and `update_id`.
    """
    _request.set(request)


def _names() -> Mapping[str, str]:
    """Returns the ids; evaluated per log line, because most calls write none."""
    request = _request.get()
    return {field: value for field in _FIELDS if (value := getattr(request, field, ""))}


class TextFormatter(InertFormatter):
    """Formats lines for people, as inert text, with the ids in brackets at the end."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Formats the line above a traceback."""
        text = super().formatMessage(record)
        names = _names()
        # Clients choose the ids: escape them, so a line stays one line.
        shown = " ".join(f"{k}={v if v.isprintable() else ascii(v)}" for k, v in names.items())
        return f"{text} [{shown}]" if names else text


class JsonFormatter(logging.Formatter):
    """Formats lines as JSON objects; `error` has the traceback, if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line without its newline."""
        time = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_names(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        text = json.dumps(line, ensure_ascii=False)
        return text if text.isprintable() else json.dumps(line)  # no C1 control, no bidi mark


def set_up(level: str, form: Literal["text", "json"]) -> None:
    """Logs all messages, warnings and uncaught exceptions of this process to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        logging.getLogger(__name__).critical("uncaught", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(uncaught: threading.ExceptHookArgs) -> None:
    if uncaught.exc_value is not None:
        logging.getLogger(__name__).critical(
            "uncaught in thread %s",
            uncaught.thread.name if uncaught.thread is not None else "unknown",
            exc_info=uncaught.exc_value,
        )
