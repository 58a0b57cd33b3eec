"""Spans in MLflow, by its own client.

`MLFLOW_TRACKING_URI` says where to, else a database in the user's own folder (`default_uri`): spans
hold prompts and answers, and a shared one would show them to others. The experiment is the run's
project, and is made if there is none. A trace is found by its tags, as `tags.step = '1'`; its
id is `tr-` and ours. `inputs` and `output` are the span's.

Several processes may write into one SQLite file. A writer makes the tables before its first span,
one process at a time (a lock beside the file), since MLflow's migrations fail side by side; after
that it waits for the other writers up to two minutes.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from treadle.tracing import FinishedSpan
from treadle.tracing.finished import INPUTS, OUTPUT
from treadle.tracing.jsonl import thaw

__all__ = ["MlflowWriter", "default_uri", "tracking_uri", "ui_command"]

_TAGS: Final = ("step", "sample_index", "rollout_n", "validate", "experiment_name")
"""Attributes of a trace's root that are its tags too, as in verl."""
_LOCK_WAIT_S: Final = 120
"""Maximum time that a writer waits for the others of a SQLite file."""


def default_uri() -> str:
    """Returns the address of the database that is used where nothing else is named."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return f"sqlite:///{Path(state, 'treadle', 'mlruns.db').absolute()}"


def tracking_uri() -> str:
    """Returns where the traces go.

    Raises:
        ValueError: A directory of files, which takes no spans.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or default_uri()
    if urlsplit(uri).scheme in ("", "file"):
        raise ValueError(
            f"MLFLOW_TRACKING_URI={uri} is a directory, in which MLflow stores no spans: set it to "
            f"a database as {default_uri()}, or to a server as http://localhost:5000"
        )
    return uri


def ui_command(uri: str) -> str | None:
    """Returns the command that shows the traces; None: the server at `uri` does."""
    if urlsplit(uri).scheme in ("http", "https", "databricks"):
        return None
    return f"mlflow ui -h 127.0.0.1 -p 5000 --backend-store-uri {uri}"


class MlflowWriter:
    """Writes spans to MLflow; see `SpanWriter`.

    Raises:
        ValueError: See `tracking_uri`.
        MlflowException: The database or the server cannot be used.
    """

    def __init__(self, project: str) -> None:
        from mlflow.entities import Span
        from mlflow.tracing.client import TracingClient
        from opentelemetry.sdk.resources import Resource

        from treadle.tracing.sinks.otel_span import kind_of, readable_span, valid_text

        self._span, self._kind_of, self._text = Span, kind_of, valid_text
        self._readable, self._resource = readable_span, Resource.get_empty()
        uri = _patient(tracking_uri())
        with _alone(uri):
            self._experiment = _experiment(uri, project)
        self._client = TracingClient(uri)

    def write(self, spans: Sequence[FinishedSpan]) -> None:
        """Writes the spans in one transaction, or one request."""
        self._client.log_spans(
            self._experiment,
            [
                self._span(self._readable(span, self._attributes(span), self._resource))
                for span in spans
            ],
        )

    def close(self, dropped: int) -> None:
        """Does nothing: every write is complete."""

    def _attributes(self, span: FinishedSpan) -> dict[str, str]:
        """Returns the attributes in MLflow's form: JSON each."""
        names = {INPUTS: "mlflow.spanInputs", OUTPUT: "mlflow.spanOutputs"}
        values: dict[str, object] = {
            "mlflow.traceRequestId": f"tr-{span.trace_id}",
            "mlflow.spanType": self._kind_of(span),
            **{names.get(key, key): value for key, value in span.attributes.items()},
        }
        if span.parent_id is None:
            values["mlflow.traceTag.mlflow.traceName"] = span.name
            for key in _TAGS:
                if key in span.attributes:
                    values[f"mlflow.traceTag.{key}"] = str(span.attributes[key])
        return {self._text(key): self._json(value) for key, value in values.items()}

    def _json(self, value: object) -> str:
        return self._text(json.dumps(value, ensure_ascii=False, default=thaw))


def _patient(uri: str) -> str:
    """Returns the address with which SQLite waits for its lock, instead of 5 s."""
    if not uri.startswith("sqlite") or "timeout=" in uri:
        return uri
    return f"{uri}{'&' if '?' in uri else '?'}timeout={_LOCK_WAIT_S}"


@contextlib.contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Lets one process at a time prepare a SQLite file."""
    from sqlalchemy import make_url

    file = make_url(uri).database if uri.startswith("sqlite") else None
    if not file:
        yield
        return
    path = Path(f"{file}.lock")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _experiment(uri: str, project: str) -> str:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client: Any = MlflowClient(tracking_uri=uri)
    if (found := client.get_experiment_by_name(project)) is None:
        try:
            return str(client.create_experiment(project))
        except MlflowException:
            # Another process may have made it meanwhile.
            if (found := client.get_experiment_by_name(project)) is None:
                raise
    return str(found.experiment_id)
