"""A server of an environment as a process that belongs to a run.

Invariant: it is started by its first user and ended, with all processes that it started, by
`aclose`, however the run ends. Its output goes to the run's, as inert text. One that ends by
itself, or is not reachable in time, is a `SetupError`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from urllib.parse import urlsplit

from treadle.agent_loop import SetupError
from treadle.agent_loop.aio import run_shielded
from treadle.agent_loop.child_output import shown_output
from treadle.tracing.child_process import supervised

_START_S = 300.0
_POLL_S = 0.1
_GRACE_S = 5.0


class ServerProcess:
    """A server that is started once.

    Args:
        command: Program and arguments; no shell.
    """

    def __init__(self, command: Sequence[str], url: str) -> None:
        self._command = tuple(command)
        parts = urlsplit(url)
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or (443 if parts.scheme in ("https", "wss") else 80)
        self._process: asyncio.subprocess.Process | None = None
        self._output = contextlib.AsyncExitStack()
        self._lock = asyncio.Lock()

    async def started(self) -> None:
        """Starts the server if nobody did, and waits until it listens.

        Raises:
            SetupError: It does not start, ended, or does not listen in time.
        """
        async with self._lock:
            if self._process is None:
                output = await self._output.enter_async_context(shown_output())
                try:
                    self._process = await asyncio.create_subprocess_exec(
                        *supervised(self._command, grace_s=_GRACE_S),
                        stdin=asyncio.subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                except OSError as error:
                    raise SetupError(f"{self._command[0]!r} does not start: {error}") from error
                await self._until_it_listens(self._process)
            elif self._process.returncode is not None:
                raise self._ended(self._process)

    async def aclose(self) -> None:
        """Ends the server: SIGTERM, and SIGKILL five seconds later."""
        async with self._output:
            if self._process is not None:
                await run_shielded(_end(self._process), timeout_s=2 * _GRACE_S)

    async def _until_it_listens(self, process: asyncio.subprocess.Process) -> None:
        try:
            async with asyncio.timeout(_START_S):
                while True:
                    if process.returncode is not None:
                        raise self._ended(process)
                    with contextlib.suppress(OSError):
                        _, writer = await asyncio.open_connection(self._host, self._port)
                        writer.close()
                        return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise SetupError(
                f"{self._command[0]!r} does not listen on {self._host}:{self._port} after "
                f"{_START_S:g} s"
            ) from error

    def _ended(self, process: asyncio.subprocess.Process) -> SetupError:
        return SetupError(
            f"the environment's server {' '.join(self._command)!r} ended with status "
            f"{process.returncode}; its output is above"
        )


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    await process.wait()
