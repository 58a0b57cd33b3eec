"""How this house starts a process: below a supervisor, so that nothing of it outlives its owner.

Invariant: when the owner has ended, however it ended, or when the program has, no process is left
that the program started, with `setsid`, a double fork or in any other way. The kernel sees to it,
and no thread of the owner or the program: `supervisor.py` describes how.

    process = subprocess.Popen(supervised(command), start_new_session=True, ...)

The process that is started so is the supervisor: its descriptors are the program's, it passes
SIGTERM on, and ends as the program ended. It costs the start of an interpreter without packages
(10 to 20 ms) and 4 MB.

Only Linux has these means (5.3 or later). Elsewhere a program is started without a supervisor:
what it leaves lives on.
"""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from treadle.tracing import supervisor
from treadle.tracing.supervisor import kill_descendants

__all__ = [
    "ENDS_BY_ITSELF",
    "child_python_path",
    "end_now",
    "kill_descendants",
    "piped_child",
    "program_of",
    "supervised",
    "write_ready",
]

ENDS_BY_ITSELF: Final = {supervisor.SPARED: "1"}
"""Variables of a process that cleans up after the program, and is left to end by itself."""


def supervised(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    grace_s: float = math.inf,
) -> list[str]:
    """Returns the command that runs another below a supervisor.

    Args:
        command: Program and arguments; no shell.
        environment: The one that the process is started with; None: this process's.
        directory: The one that the process is started in; None: this process's.
        grace_s: Seconds after which SIGTERM, which goes to the program's whole group then, is
            followed by SIGKILL for everything; infinite: SIGTERM goes to the program alone.

    Raises:
        FileNotFoundError: The program is not there, or cannot be run.
    """
    program = command[0]
    searched: Sequence[str | Path] = [directory or ""]
    if os.sep not in program:
        searched = os.get_exec_path(None if environment is None else dict(environment))
    found = [os.path.join(path, program) for path in searched]
    if not any(os.path.isfile(path) and os.access(path, os.X_OK) for path in found):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)
    if sys.platform != "linux":
        return [*command]
    # Without the environment's, whose configuration takes a third of the time to read.
    python = getattr(sys, "_base_executable", None) or sys.executable
    own = [python, "-I", "-S", supervisor.__file__]
    return [*own, str(os.getpid()), str(grace_s), *command]


class Signalled(Protocol):
    """A process of `subprocess` or `asyncio`."""

    def send_signal(self, signal: int, /) -> None:
        """Sends a signal."""
        ...


def end_now(process: Signalled) -> None:
    """Ends a supervised program and everything below it with SIGKILL; does not wait."""
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGCONT)  # it may have been stopped


def piped_child(
    module: str, log_path: Path, *, environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Starts a module that reads lines and answers in lines; what else it prints goes to a log.

    Raises:
        OSError: The process cannot be started, or the log cannot be written.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        return subprocess.Popen(
            supervised([sys.executable, "-P", "-m", module]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            # Ctrl-C reaches only the parent, which then ends it.
            start_new_session=True,
        )


def program_of(pid: int) -> int:
    """Returns the process of the program below a supervisor, or of the latter if there is none."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        children = []
    return int(children[0]) if children else pid


def write_ready(path: Path, address: str) -> None:
    """Announces that this process can be reached at `address`; the file appears complete."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps({"address": address, "pid": os.getpid()}), encoding="utf-8")
    partial.replace(path)


def child_python_path() -> str:
    """Returns the PYTHONPATH with which a child imports what this process imports.

    It is made from `sys.path`, not from the variable: a zipped or sandboxed start adds entries to
    `sys.path` only, and a relative entry means something else in another directory.
    """
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    entries = []
    for entry in sys.path:
        path = os.path.abspath(entry or os.curdir)
        of_python = path in standard or path.endswith(("lib-dynload", ".zip"))
        if not of_python and os.path.exists(path) and path not in entries:
            entries.append(path)
    return os.pathsep.join(entries)
