"""A real server in a process of its own, and in the environment of its engine.

Invariant: when the block that started it is left, the server and every process that it started
are gone, whatever became of it before. It ends by itself with a test that is killed, and leaves no
block. What it writes is read all the time, so that a talkative engine never waits for its reader.

Who waits: `wait_ready` for the ready file, looked for whenever the server writes a line (it
writes one after the file), by a thread that the end of the server wakes too.
"""

import asyncio
import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

_KEPT_LINES = 200
_GRACE_S = 30.0

HERE = (sys.executable, "-m", "treadle.rollout_server")
"""Starts a server in this interpreter's environment."""


class ServerProcess:
    """A server that starts now. A context manager; `address` is there after `wait_ready`.

    Args:
        arguments: Of its command line.
        command: Program and leading arguments; see `engine_command`.
    """

    def __init__(self, *arguments: str, command: Sequence[str] = HERE) -> None:
        self.address = ""
        self._directory = tempfile.TemporaryDirectory()
        self._ready_file = Path(self._directory.name) / "ready.json"
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._settled = threading.Event()
        own = ("--ready_file", str(self._ready_file), "--parent_pid", str(os.getpid()))
        self.popen = subprocess.Popen(
            (*command, *own, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # A group of its own, with which what the engine starts can be ended.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """The last lines that it wrote."""
        return "".join(list(self._lines))

    def wait_ready(self) -> Self:
        """Waits until it serves; blocks.

        Raises:
            RuntimeError: It ended before it served; the message is what it wrote.
        """
        self._settled.wait()
        if not self.address:
            raise RuntimeError(f"the server ended before it was ready:\n{self.output}")
        return self

    def close(self) -> None:
        """Asks it to end, then kills what is left of it and its children; blocks. Idempotent."""
        if self.popen.poll() is None:
            self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self._reader.join()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as stream:
            for line in stream:
                self._lines.append(line)
                if not self._settled.is_set() and self._ready_file.exists():
                    self.address = json.loads(self._ready_file.read_text())["address"]
                    self._settled.set()
        self._settled.set()


@contextmanager
def running_server(*arguments: str, command: Sequence[str] = HERE) -> Iterator[ServerProcess]:
    """A server that serves for as long as the block lasts; for fixtures of a whole module.

        @pytest.fixture(scope="module")
        def server() -> Iterator[ServerProcess]:
            with running_server("--engine", "vllm", command=engine_command("vllm")) as server:
                yield server

    Args:
        arguments: Of its command line.
        command: Program and leading arguments; see `engine_command`.

    Raises:
        RuntimeError: It ended before it served; the message is what it wrote.
    """
    with ServerProcess(*arguments, command=command) as process:
        yield process.wait_ready()


@asynccontextmanager
async def server_process(*arguments: str, command: Sequence[str] = HERE) -> AsyncIterator[str]:
    """`running_server` for as long as an async block lasts.

    Yields:
        Its address.
    """
    process = ServerProcess(*arguments, command=command)
    try:
        await asyncio.to_thread(process.wait_ready)
        yield process.address
    finally:
        # Shielded: a second cancellation must not leave the server behind.
        await asyncio.shield(asyncio.to_thread(process.close))
