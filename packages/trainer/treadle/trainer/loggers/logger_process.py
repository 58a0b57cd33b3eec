"""The driver's side of one logger: a process, a bounded queue before it, and a limit at its end.

Invariant: only `close` waits, and no longer than its deadline. Nothing that the logger does raises
here. The first failure is one warning; later ones appear only in the log.
"""

import json
import logging
import queue
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from treadle.tracing.child_process import end_now, piped_child
from treadle.trainer.launch.environment import child_environment
from treadle.trainer.launch.local import describe_exit
from treadle.trainer.launch.process import child_python_path

__all__ = ["LoggerProcess"]

_log = logging.getLogger(__name__)

_CAPACITY: Final = 1000
"""Records that wait for the process, beside those in its pipe."""


class LoggerProcess:
    """One logger, in a separate process.

    Args:
        hello: First message to the process; see `process.py`.
        log_path: Where everything goes that it prints.
        capacity: Records that may wait; later ones are lost.
    """

    def __init__(
        self, name: str, hello: Mapping[str, Any], *, log_path: Path, capacity: int = _CAPACITY
    ) -> None:
        self.name = name
        self._log_path = log_path
        self._records: queue.Queue[str | None] = queue.Queue(capacity)
        self._lock = threading.Lock()
        self._warned = False
        self._sent = self._taken = self._lost = 0
        self._failed_to_start = False
        self.started = threading.Event()
        """The logger was made, or failed to be."""
        self._answers_end = threading.Event()
        self._ended = False
        self._killed = False
        self._process: subprocess.Popen[bytes] | None = None
        try:
            environment = child_environment(child_python_path(), {})
            self._process = piped_child(
                "treadle.trainer.loggers.process", log_path, environment=environment
            )
        except OSError as error:
            self._warn(f"cannot be started: {error}")
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        self._records.put_nowait(json.dumps(hello))
        for work, stream in (
            (self._write, self._process.stdin),
            (self._read, self._process.stdout),
        ):
            threading.Thread(
                target=work, args=(stream,), name=f"logger {name}", daemon=True
            ).start()

    def put(self, record: Mapping[str, Any]) -> None:
        """Gives a record to the logger, some time; loses it if too many wait."""
        if self._process is None or self._answers_end.is_set():
            self._lost += 1
            return
        try:
            self._records.put_nowait(json.dumps(record))
        except queue.Full:
            self._lost += 1
            self._warn(
                f"does not keep up: {self._records.maxsize} records wait for it, and what comes "
                "meanwhile is lost to it"
            )
        else:
            self._sent += 1

    def close(self, finish: Mapping[str, Any], deadline_s: float) -> None:
        """Gives the last record, waits for the logger to finish, and ends the process.

        Args:
            deadline_s: Maximum time for all of it; then the process is killed.
        """
        if self._process is None:
            return
        until = time.monotonic() + deadline_s
        if not self._answers_end.is_set():
            with suppress(queue.Full):
                self._records.put(json.dumps(finish), timeout=deadline_s)
                self._sent += 1
        if not self._answers_end.wait(max(0.0, until - time.monotonic())):
            missing = self._sent - self._taken
            self._warn(
                f"has not finished within {deadline_s:g} s and is ended: "
                f"{missing} records may be missing from it"
            )
        with suppress(subprocess.TimeoutExpired):
            if self._ended:
                self._process.wait(max(0.0, until - time.monotonic()))
        self._killed = True
        end_now(self._process)
        self._process.wait()
        if self._lost:
            _log.info("logger %s: %d records were lost", self.name, self._lost)

    def _write(self, stream: IO[bytes]) -> None:
        with suppress(OSError), stream:  # the process may have ended, and its pipe
            while (line := self._records.get()) is not None:
                stream.write(f"{line}\n".encode())
                stream.flush()

    def _read(self, stream: IO[bytes]) -> None:
        try:
            for line in stream:
                self._answer(json.loads(line))
        except ValueError as error:
            self._warn(f"answers what cannot be read: {error}")
        self.started.set()
        if not self._ended and not self._killed and not self._failed_to_start:
            assert self._process is not None
            status = self._process.wait()
            self._warn(f"{describe_exit(status)}, and logs nothing more")
        stream.close()
        self._answers_end.set()
        with suppress(queue.Full):  # then the writer does not wait for a record
            self._records.put_nowait(None)

    def _answer(self, answer: Mapping[str, Any]) -> None:
        match answer["kind"]:
            case "done":
                self._taken += answer["sent"]
            case "failed":
                self._taken += answer["sent"]
                self._lost += 1
                if self.started.is_set():
                    self._warn(f"failed at {answer['what']}: {answer['text']}")
                else:
                    self._failed_to_start = True
                    self._warn(f"failed at its start and logs nothing: {answer['text']}")
            case "started":
                self.started.set()
            case "ended":
                self._ended = True

    def _warn(self, text: str) -> None:
        with self._lock:
            warned, self._warned = self._warned, True
        if warned:
            _log.info("logger %s %s", self.name, text)
        else:
            _log.warning("logger %s %s; the run continues; see %s", self.name, text, self._log_path)
