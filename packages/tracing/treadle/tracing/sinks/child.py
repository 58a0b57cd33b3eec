"""The process that writes spans with a service's client; `child_sink.py` is its other side.

A client has threads, global settings and an end at exit that may hang; here they are nobody else's.

The first line of the input is {"backend", "settings", "deadline_s"}; each later one is a list of
spans, as `to_json` writes them. Each line gets one answer, {"error": null} or {"error": text}, and
so does the end of the input, after which the writer is closed. What the client prints goes to the
standard error.

Who waits: the process for its input; it ends `deadline_s` after the end of the input at the latest,
also if its parent is gone and the client hangs.
"""

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from treadle.tracing.jsonl import span_of
from treadle.tracing.queued import SpanWriter

__all__ = ["BATCHES", "main"]

BATCHES: Final[Mapping[str, int]] = MappingProxyType({"mlflow": 256, "otlp": 64, "weave": 512})
"""Maximum number of spans per line, by backend: one transaction, one request, one flush."""


def main() -> None:
    """Runs until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what a client prints belongs into the log
    hello = json.loads(sys.stdin.readline())
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines, hello["deadline_s"]), daemon=True).start()

    def attempt(work: Callable[[], object]) -> bool:
        try:
            work()
        except BaseException as error:  # a client's; SystemExit too
            traceback.print_exception(error)
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
            return False
        answers.write('{"error": null}\n')
        return True

    writer: list[SpanWriter] = []
    if attempt(lambda: writer.append(_make(hello["backend"], hello["settings"]))):
        while (line := lines.get()) is not None:
            spans = json.loads(line)
            attempt(lambda: writer[0].write([span_of(fields) for fields in spans]))  # noqa: B023
        attempt(lambda: writer[0].close(0))
    sys.stderr.flush()
    os._exit(0)  # a client's own end at exit may hang; the writer is closed


def _read(lines: "queue.SimpleQueue[str | None]", deadline_s: float) -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put(None)
    threading.Event().wait(deadline_s)
    os._exit(1)


def _make(backend: str, settings: Mapping[str, Any]) -> SpanWriter:
    if backend == "mlflow":
        from treadle.tracing.sinks.mlflow import MlflowWriter

        return MlflowWriter(**settings)
    if backend == "otlp":
        from treadle.tracing.sinks.otlp import OtlpWriter

        return OtlpWriter(**settings)
    from treadle.tracing.sinks.weave import WeaveWriter

    return WeaveWriter(**settings)


if __name__ == "__main__":
    main()
