"""Spans in Weights & Biases Weave, by its own client.

The project is the run's, the same as that of the logger wandb, so that run and traces are one page;
where the run's id in wandb is known, each call is linked to it and to its step. Account and address
come from W&B's variables: WANDB_API_KEY, WANDB_ENTITY, WANDB_BASE_URL.

A call's op is the span's name. Weave makes other ids; ours are in the call's attributes, as
`treadle.trace_id` and `treadle.span_id`. A call is made after its parent and a span ends before
it, so the spans of a trace wait for its root.

The client sends from its own threads, and reports losses only in its log. So each `write` waits
until it has sent everything, and raises if an error was logged. Its settings are variables of the
process, so the writer has a separate process (`child.py`).
"""

import datetime
import logging
import netrc
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from treadle.tracing import FinishedSpan
from treadle.tracing.finished import INPUTS, OUTPUT
from treadle.tracing.whole_traces import WholeTraces

__all__ = ["WeaveWriter", "has_credentials", "service_url"]

_WANDB: Final = "https://api.wandb.ai"

_SETTINGS: Final[Mapping[str, str]] = {
    # The calls are made by us: there is no code to capture and no library to patch.
    "WEAVE_CAPTURE_CODE": "false",
    "WEAVE_CAPTURE_CLIENT_INFO": "false",
    "WEAVE_CAPTURE_SYSTEM_INFO": "false",
    "WEAVE_IMPLICITLY_PATCH_INTEGRATIONS": "false",
    "WEAVE_PRINT_CALL_LINK": "false",
    # What is lost is counted; the client need not keep it in files.
    "WEAVE_ENABLE_DISK_FALLBACK": "false",
}
"""Variables and not arguments: the client's threads read only these."""


def has_credentials() -> bool:
    """Returns whether the client would find a key: in a variable, or in ~/.netrc."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or _WANDB).netloc
    for name in (".netrc", "_netrc"):
        path = Path.home() / name
        try:
            if path.exists() and netrc.netrc(path).authenticators(host) is not None:
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def service_url() -> str:
    """Returns the address that the client sends calls to."""
    if url := os.environ.get("WF_TRACE_SERVER_URL"):
        return url
    base = (os.environ.get("WANDB_BASE_URL") or _WANDB).rstrip("/")
    return "https://trace.wandb.ai" if base == _WANDB else f"{base}/traces"


class WeaveWriter:
    """Writes whole traces to Weave; see `SpanWriter`. Their attributes are plain, as of `span_of`.

    Args:
        run_id: The run's id in wandb; None: the calls are linked to no run.

    Raises:
        Exception: The client's own: no such entity, a key that is refused, a service that is down.
    """

    def __init__(self, project: str, run_id: str | None = None) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        import weave

        self._client = weave.init(project)
        self._run_id = run_id
        self._traces = WholeTraces()
        self._errors = _Errors()
        logging.getLogger("weave").addHandler(self._errors)

    def write(self, spans: Sequence[FinishedSpan]) -> None:
        """Writes the traces that are complete now.

        Raises:
            ConnectionError: The client lost some of them.
        """
        for span in spans:
            for trace in self._traces.add(span):
                self._write_trace(trace)
        self._flush()

    def close(self, dropped: int) -> None:
        """Writes the traces whose root did not come.

        Raises:
            ConnectionError: The client lost some of them.
        """
        for trace in self._traces.rest():
            self._write_trace(trace)
        self._flush()

    def _flush(self) -> None:
        self._client.flush()
        if first := self._errors.take():
            raise ConnectionError(first)

    def _write_trace(self, trace: Sequence[FinishedSpan]) -> None:
        here = {span.span_id for span in trace}
        children: dict[str | None, list[FinishedSpan]] = defaultdict(list)
        for span in sorted(trace, key=lambda span: span.start_unix_ns):
            # A parent in another process is in no call of this client.
            children[span.parent_id if span.parent_id in here else None].append(span)

        def write(span: FinishedSpan, parent: Any) -> None:
            call = self._create(span, parent)
            for child in children[span.span_id]:
                write(child, call)
            self._finish(span, call)

        for span in children[None]:
            write(span, None)

    def _create(self, span: FinishedSpan, parent: Any) -> Any:
        attributes: dict[str, Any] = dict(span.attributes)
        inputs, _ = attributes.pop(INPUTS, {}), attributes.pop(OUTPUT, None)
        attributes["treadle"] = {"trace_id": span.trace_id, "span_id": span.span_id}
        if self._run_id is not None:
            step = attributes.get("step")
            self._client.set_wandb_run_context(self._run_id, step if type(step) is int else None)
        return self._client.create_call(
            span.name,
            inputs if isinstance(inputs, dict) else {"value": inputs},
            parent=parent,
            attributes=attributes,
            use_stack=False,
            started_at=_time(span.start_unix_ns),
        )

    def _finish(self, span: FinishedSpan, call: Any) -> None:
        error: Exception | None = None
        if span.error is not None:
            # The client shows the name of the exception's type.
            error = type(span.error.type, (Exception,), {})(span.error.message)
        self._client.finish_call(
            call,
            output=span.attributes.get(OUTPUT),
            exception=error,
            ended_at=_time(span.end_unix_ns),
        )


class _Errors(logging.Handler):
    """Keeps the first error that the client's threads log, until it is taken."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._first: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self._first = self._first or record.getMessage()

    def take(self) -> str | None:
        first, self._first = self._first, None
        return first


def _time(unix_ns: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(unix_ns / 1e9, tz=datetime.UTC)
