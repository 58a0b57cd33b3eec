"""A program, its execution, and the protocol of a sandbox that runs it.

Invariant: whatever a program does is an `Execution`: a crash, a timeout and a megabyte of output
are results, not errors. An error means that the program did not run or that its result is unknown;
it is the sandbox's fault, never the model's.

A caller waits in `run` for a free place and then for the program; cancelling it ends the program
within a second and frees the place.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self

from treadle.agent_loop import ToolError


class SandboxError(ToolError):
    """The sandbox failed: it is down, broken, or gave an invalid answer. Ends the attempt."""


class SandboxBusyError(SandboxError):
    """Every place and the queue are taken; the program was not begun."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnsupportedProgramError(SandboxError):
    """The sandbox does not run such programs: the language, a file name, a limit above its own."""

    retryable = False


class RunStatus(enum.StrEnum):
    """How a program ended, in SandboxFusion's words."""

    FINISHED = "Finished"
    """It ended: well, with an exit code, or by a signal (a limit of the sandbox is one)."""
    TIMED_OUT = "TimeLimitExceeded"
    """It ran longer than `Program.timeout_s` and was ended with all its processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program, and how it is run.

    Attributes:
        timeout_s: Wall-clock seconds, from its first instruction.
        memory_limit_mib: For it and its processes together. None: the sandbox's own limit.
        stdin: Text of standard input; None: it is empty.
        files: Relative path to content; there before it begins.
        fetch_files: Paths to give back after it ended, relative to the work directory or absolute
            in the sandbox; missing ones are left out.
    """

    code: str
    timeout_s: float
    language: str = "python"
    memory_limit_mib: int | None = None
    stdin: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch_files: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"timeout_s is {self.timeout_s}; it must be above 0 and finite")
        if self.memory_limit_mib is not None and self.memory_limit_mib < 1:
            raise ValueError(f"memory_limit_mib is {self.memory_limit_mib}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The result of a program.

    Attributes:
        stdout: Standard output, as UTF-8; bytes that are none become U+FFFD.
        stderr: Likewise; a limit that ended the program is named at its end.
        return_code: Its exit status, or minus the number of the signal that ended it. None when
            it timed out.
        queue_s: Seconds it waited for a free place; estimated if the sandbox reports none.
        files: Files of `Program.fetch_files` that exist.
        warm: Whether an interpreter with the libraries imported was waiting for it.
        num_retries: Times that it was sent again after no answer or a busy sandbox.
    """

    status: RunStatus
    stdout: str
    stderr: str
    return_code: int | None
    execution_s: float
    queue_s: float = 0.0
    files: Mapping[str, bytes] = field(default_factory=dict)
    warm: bool = False
    num_retries: int = 0


class Sandbox(Protocol):
    """Runs programs between its `__aenter__` and its `__aexit__`."""

    async def __aenter__(self) -> Self:
        """Takes what running needs; raises `SetupError` where that is missing."""
        ...

    async def __aexit__(self, *exc_info: object) -> None:
        """Ends the programs under way and frees everything."""
        ...

    async def run(self, program: Program) -> Execution:
        """Runs one program.

        Raises:
            UnsupportedProgramError: The sandbox does not run such programs.
            SandboxBusyError: Its queue is full.
            SandboxError: It failed.
        """
        ...
