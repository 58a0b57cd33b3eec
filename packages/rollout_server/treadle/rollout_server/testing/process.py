"""A real server in a separate process, in the environment of its engine.

Invariant: at the end of the block that started it, the server and all its child processes have
ended, whatever happened before. It also ends when the test is killed and cannot leave the block.
A thread reads its output all the time, so a talkative engine never blocks on writing.

Who waits: `wait_ready` waits for the ready file. A thread checks for it whenever the server writes
a line (it writes one after the file); the end of the server wakes that thread too.
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
from typing import Self

_KEPT_LINES = 200
_GRACE_S = 30.0

HERE = (sys.executable, "-m", "treadle.rollout_server")
"""Command of a server in the environment of this interpreter."""


class ServerProcess:
    """A server process and context manager; `address` is set after `wait_ready`.

    Args:
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
            # A separate process group, so the processes of the engine can be killed with it.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """The last lines of its output."""
        return "".join(list(self._lines))

    def wait_ready(self) -> Self:
        """Blocks until the server is ready.

        Raises:
            RuntimeError: It ended before it was ready; the message has its output.
        """
        self._settled.wait()
        if not self.address:
            raise RuntimeError(f"the server ended before it was ready:\n{self.output}")
        return self

    def close(self) -> None:
        """Terminates the server, then kills remaining processes; blocks. Idempotent."""
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

    def __exit__(self, *exc_info: object) -> None:
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
    """Runs a server for as long as the block lasts; for fixtures of a whole module.

        @pytest.fixture(scope="module")
        def server() -> Iterator[ServerProcess]:
            with running_server("--engine", "vllm", command=engine_command("vllm")) as server:
                yield server

    Args:
        command: Program and leading arguments; see `engine_command`.

    Raises:
        RuntimeError: It ended before it was ready; the message has its output.
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
