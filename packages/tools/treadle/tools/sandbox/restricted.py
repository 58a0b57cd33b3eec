"""Small programs in a restricted interpreter: Monty, a Python subset written in Rust.

Invariant: a program has no files, no network, no processes and no library but what Monty brings
(parts of `math`, `re`, `json`, `datetime`, ...): they do not exist in it. Time, memory, recursion
and output are limited; a program that writes more than a megabyte is ended at once, with its helper
process. That process is not isolated by the kernel, so a flaw of the interpreter would affect the
host; that is the price of a millisecond per program. For arithmetic; code that wants numpy wants
`LocalSandbox`.

Who waits: `run`, for one of the helper processes.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from treadle.agent_loop import SetupError
from treadle.agent_loop.aio import run_until
from treadle.tools.sandbox.execution import (
    Execution,
    Program,
    RunStatus,
    SandboxError,
    UnsupportedProgramError,
)

if TYPE_CHECKING:
    import pydantic_monty

_MEMORY_MIB: Final = 256
_OUTPUT_BYTES: Final = 1 << 20
_RECURSION: Final = 500
_ABORTED: Final = -6


class RestrictedSandbox:
    """Runs programs with Monty.

    Args:
        processes: Helper processes, each of which runs one program at a time.

    Raises:
        SetupError: pydantic-monty is not installed.
    """

    def __init__(self, *, processes: int) -> None:
        try:
            import pydantic_monty
        except ImportError as error:
            raise SetupError(
                "the restricted interpreter needs pydantic-monty: pip install pydantic-monty"
            ) from error
        self._monty = pydantic_monty
        self._processes = processes
        self._pool: pydantic_monty.AsyncMonty | None = None

    async def __aenter__(self) -> Self:
        """Starts the first helper process.

        Raises:
            SetupError: Its program is missing.
        """
        try:
            pool = self._monty.AsyncMonty(
                binary_path=_monty_program(), max_processes=self._processes
            )
            self._pool = await pool.__aenter__()
        except OSError as error:
            raise SetupError(f"cannot start the restricted interpreter: {error}") from error
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Ends the helper processes."""
        if self._pool is not None:
            await self._pool.__aexit__(None, None, None)
            self._pool = None

    async def run(self, program: Program) -> Execution:
        """Runs one program.

        Raises:
            UnsupportedProgramError: It is not Python, or wants input or files.
            SandboxError: The helper process failed.
        """
        if program.language != "python" or program.stdin or program.files or program.fetch_files:
            raise UnsupportedProgramError(
                "the restricted interpreter runs Python without input and files; given: "
                f"{program.language}, {len(program.files)} files"
            )
        assert self._pool is not None, "the sandbox was not entered"
        full = asyncio.Event()
        loop = asyncio.get_running_loop()
        output = _Output(partial(loop.call_soon_threadsafe, full.set))
        arrived = began = time.monotonic()
        error: BaseException | None = None

        async def feed() -> None:
            nonlocal began, error
            assert self._pool is not None
            try:
                async with self._pool.checkout(limits=self._limits(program)) as session:
                    began = time.monotonic()
                    await session.feed_run(program.code, print_callback=output)
            except (self._monty.MontyError, RecursionError) as raised:
                error = raised
            except OSError as raised:
                raise SandboxError(f"the restricted interpreter failed: {raised}") from raised

        await run_until(feed(), full.wait)
        stdout, stderr = output.text("stdout"), output.text("stderr")
        timed_out = not output.is_full and self._timed_out(error)
        if output.is_full:
            stderr += f"\nthe limit of {_OUTPUT_BYTES >> 10} KiB of output was exceeded\n"
            return_code = -signal.SIGKILL
        else:
            stderr += "" if error is None or timed_out else self._shown(error)
            return_code = self._return_code(error)
        return Execution(
            status=RunStatus.TIMED_OUT if timed_out else RunStatus.FINISHED,
            stdout=stdout,
            stderr=stderr,
            return_code=None if timed_out else return_code,
            execution_s=time.monotonic() - began,
            queue_s=began - arrived,
        )

    def _limits(self, program: Program) -> pydantic_monty.ResourceLimits:
        return {
            "max_feed_duration_secs": program.timeout_s,
            "max_total_sleep_secs": program.timeout_s,
            "max_memory": (program.memory_limit_mib or _MEMORY_MIB) << 20,
            "max_recursion_depth": _RECURSION,
        }

    def _timed_out(self, error: BaseException | None) -> bool:
        if isinstance(error, self._monty.MontyCrashedError):
            return error.timed_out
        is_monty = isinstance(error, self._monty.MontyError)
        return is_monty and isinstance(_inner(error), TimeoutError)

    def _return_code(self, error: BaseException | None) -> int:
        if error is None:
            return 0
        return _ABORTED if isinstance(error, self._monty.MontyCrashedError) else 1

    def _shown(self, error: BaseException) -> str:
        kinds = (self._monty.MontySyntaxError, self._monty.MontyRuntimeError)
        return f"{error.display() if isinstance(error, kinds) else error}\n"


class _Output:
    """Keeps the output of a program; the interpreter calls it on another thread.

    Args:
        tell_full: Called once, when a stream has more than `_OUTPUT_BYTES`.
    """

    def __init__(self, tell_full: Callable[[], object]) -> None:
        self._tell_full = tell_full
        self._streams = {"stdout": bytearray(), "stderr": bytearray()}
        self.is_full = False

    def __call__(self, stream: str, text: str) -> None:
        """Keeps a piece, as far as there is room."""
        kept, new = self._streams[stream], text.encode()
        room = _OUTPUT_BYTES - len(kept)
        kept += new[:room]
        if len(new) > room and not self.is_full:
            self.is_full = True
            self._tell_full()

    def text(self, stream: str) -> str:
        """Returns what a stream has."""
        return self._streams[stream].decode(errors="ignore")


def _inner(error: Any) -> object:
    return error.exception()


def _monty_program() -> Path | None:
    """Returns the program's path as its wheel records it, since a scripts folder may be missing."""
    try:
        files = importlib.metadata.files("pydantic-monty-runtime") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    places = [Path(file.locate()).resolve() for file in files if file.name == "monty"]
    return next((place for place in places if place.is_file()), None)
