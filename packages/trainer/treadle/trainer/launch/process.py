"""Processes: one program of the run, started by a launcher on this machine or another.

Invariant: a process never outlives the one that started it. Every program is started with
`--parent_pid N` and exits when that process is gone (`treadle.agent_loop.child_process`). Closing a
launcher ends what is left. The program prints to `<name>.log`, whose last lines are part of every
error about it.

A program that serves others writes `{"address": "host:port", "pid": n}` to its `--ready_file`, by
rename. `Process.ready` waits for that file, or for the end of the process.
"""

import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

from treadle.trainer.config.topology import Devices
from treadle.trainer.launch.run_tls import RunTls

__all__ = [
    "Launcher",
    "LostProcessError",
    "Process",
    "ProcessError",
    "ProcessSpec",
    "child_python_path",
]


class ProcessError(RuntimeError):
    """A process did not start, or exited; the message names it and ends with its log."""


class LostProcessError(ProcessError):
    """A process was killed, or is gone with its node or with what watched it; another may do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to run: `python -m module args --parent_pid N --ready_file F`.

    Attributes:
        name: Unique in the run; names the log.
        command: Program and leading arguments that start the module in another environment, in
            place of `python -m module`; it sees nothing of this interpreter's. Empty: this
            interpreter.
        args: Arguments; `{host}` stands for the address at which the machine is reached.
        devices: Its GPUs; None: GPUs are not assigned.
        gpus: Number of GPUs that Ray reserves, where they are not assigned.
        placement: Where Ray starts it, unless its GPUs say so: on any node, spread over the nodes,
            or on the driver's.
    """

    name: str
    module: str
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    devices: Devices | None = None
    gpus: float = 0.0
    placement: Literal["any", "spread", "driver"] = "any"


class Process(Protocol):
    """A started program. Methods do not block the event loop."""

    @property
    def name(self) -> str:
        """The name in its spec."""
        ...

    @property
    def node(self) -> str:
        """The name of the machine that it was started on."""
        ...

    async def ready(self, deadline_s: float) -> str:
        """Waits until the program serves; returns its `host:port`.

        Raises:
            LostProcessError: A signal ended it first, or its node is gone; or it exited by itself
                while the kernel of its machine ended a process for memory, as an engine's.
            ProcessError: It ended first, or the deadline passed.
        """
        ...

    async def wait(self) -> int:
        """Waits for its end; returns the exit status, or -n if signal n ended it."""
        ...

    def describe_end(self, status: int) -> str:
        """Returns how it ended, and on which node, for a message."""
        ...

    async def log_tail(self, lines: int = 20) -> str:
        """Returns the last lines that it printed."""
        ...

    async def stop(self, grace_s: float = 10.0) -> None:
        """Ends it with SIGTERM, and SIGKILL after `grace_s`; returns when it is gone.

        One that even SIGKILL does not end is left behind with a warning.
        """
        ...


class Launcher(Protocol):
    """Starts processes, and ends those that still run when it is closed."""

    @property
    def tls(self) -> RunTls | None:
        """The run's certificates, where its processes may be on several hosts; else None."""
        ...

    async def start(self, spec: ProcessSpec) -> Process:
        """Starts one process.

        Raises:
            ProcessError: It could not be started there.
        """
        ...

    async def __aenter__(self) -> Self:
        """Connects to the machines."""
        ...

    async def __aexit__(self, *exc_info: object) -> None:
        """Ends every process that still runs."""
        ...


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
