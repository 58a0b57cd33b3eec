"""A sink whose client runs in a separate process, `child.py`.

Invariant: that of `QueuedSink`, and when `close` returns, the process has ended. Each batch waits
for its answer, so a span that the process has not written is counted, whatever the process does.

Who waits: only the sink's thread, for the process. The process starts beside the run: the first
batch waits until its client is made.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from treadle.tracing import FinishedSpan, QueuedSink, SinkReport
from treadle.tracing.child_process import end_now, piped_child
from treadle.tracing.jsonl import to_bytes, to_json
from treadle.tracing.sinks.child import BATCHES

__all__ = ["ChildSink"]


class ChildSink(QueuedSink):
    """Writes spans with a service's client. Close it, or use it with `with` or `async with`.

    Args:
        settings: The arguments of its writer.
        environment: Variables of the process; with its PYTHONPATH it finds this package.
        log_path: Where everything goes that the client prints.
        capacity: Maximum number of spans that wait for the client.
        close_timeout_s: Maximum time in seconds that `close` waits for the client.

    Raises:
        OSError: The process cannot be started, or the log cannot be written.
    """

    def __init__(
        self,
        backend: str,
        settings: Mapping[str, Any],
        *,
        environment: Mapping[str, str],
        log_path: Path,
        capacity: int = 50_000,
        close_timeout_s: float = 30.0,
    ) -> None:
        module = "treadle.tracing.sinks.child"
        self._process = piped_child(module, log_path, environment=environment)
        hello = {"backend": backend, "settings": settings, "deadline_s": close_timeout_s}
        self._child = _ChildWriter(self._process, hello, log_path)
        super().__init__(
            f"traces to {backend}",
            self._child,
            capacity=capacity,
            batch=BATCHES[backend],
            linger_s=0.5,
            close_timeout_s=close_timeout_s,
        )

    @property
    def bytes_written(self) -> int:
        """The size of what was given to the client, as JSON."""
        return self._child.bytes_written

    def close(self, timeout_s: float | None = None) -> SinkReport:
        """See `QueuedSink`; ends the process too."""
        report = super().close(timeout_s)
        end_now(self._process)
        self._process.wait()
        return report


class _ChildWriter:
    def __init__(
        self, process: "subprocess.Popen[bytes]", hello: Mapping[str, Any], log_path: Path
    ) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._input, self._answers, self._log_path = process.stdin, process.stdout, log_path
        self._kill = partial(end_now, process)
        self._waits_for_start = True
        self._no_start: str | None = None
        self.bytes_written = 0
        self._send(json.dumps(hello))

    def write(self, spans: Sequence[FinishedSpan]) -> None:
        if self._waits_for_start:
            self._waits_for_start = False
            try:
                self._answer()
            except RuntimeError as error:
                self._no_start = f"failed at its start: {error}"
        if self._no_start is not None:
            raise RuntimeError(self._no_start)
        self.bytes_written += self._send("[" + ",".join(map(to_json, spans)) + "]")
        self._answer()

    def close(self, dropped: int) -> None:
        """Waits for the client to finish what it has."""
        with self._answers:
            if self._waits_for_start:  # nothing was written
                self._kill()
            with suppress(BrokenPipeError):
                self._input.close()
            if not self._waits_for_start and self._no_start is None:
                self._answer()

    def _send(self, line: str) -> int:
        data = to_bytes(line)
        with suppress(BrokenPipeError):  # the end of the process is in its answers
            self._input.write(data)
            self._input.flush()
        return len(data)

    def _answer(self) -> None:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"its process has ended; see {self._log_path}")
        if (error := json.loads(line)["error"]) is not None:
            raise RuntimeError(f"{error}; see {self._log_path}")
