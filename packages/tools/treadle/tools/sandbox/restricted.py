"""Small programs in a restricted interpreter: Monty, a Python subset written in Rust.

Invariant: a program has no files, no network, no processes and no library but what Monty brings
(parts of `math`, `re`, `json`, `datetime`, ...): they do not exist in it. Time, memory, recursion
and output are limited; a program that writes more than a megabyte fails at the end of its run. It
runs in a helper process that is not isolated by the kernel, so a flaw of the interpreter would
affect the host; that is the price of a millisecond per program. For arithmetic; code that wants
numpy wants `LocalSandbox`.

Who waits: `run`, for one of the helper processes.
"""

from __future__ import annotations

import importlib.metadata
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from treadle.agent_loop import SetupError
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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
        output = self._monty.CollectStreams(_OUTPUT_BYTES)
        arrived = began = time.monotonic()
        error: BaseException | None = None
        try:
            async with self._pool.checkout(limits=self._limits(program)) as session:
                began = time.monotonic()
                await session.feed_run(program.code, print_callback=output)
        except (self._monty.MontyError, RecursionError) as raised:
            error = raised
        except OSError as raised:
            raise SandboxError(f"the restricted interpreter failed: {raised}") from raised
        stdout, stderr = (
            "".join(text for stream, text in output.output if stream == wanted)
            for wanted in ("stdout", "stderr")
        )
        timed_out = self._timed_out(error)
        return Execution(
            status=RunStatus.TIMED_OUT if timed_out else RunStatus.FINISHED,
            stdout=stdout,
            stderr=stderr + ("" if error is None or timed_out else self._shown(error)),
            return_code=None if timed_out else self._return_code(error),
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
