"""Processes: one program of the run, started by a launcher on this machine or another.

Invariant: no process outlives the one that started it (`treadle.tracing.child_process`). Closing a
launcher ends what is left. The program prints to `<name>.log`, whose last lines are part of every
error about it.

A program that serves others writes `{"address": "host:port", "pid": n}` to its `--ready_file`, by
rename. `Process.ready` waits for that file, or for the end of the process.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

from treadle.policy.client.process import RankProcess
from treadle.tracing.child_process import child_python_path
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
    """What to run: `python -m module args --ready_file F`.

    Attributes:
        name: Unique in the run; names the log.
        command: Program and leading arguments that start the module in another environment, in
            place of `python -m module`; it sees nothing of this interpreter's. Empty: this
            interpreter.
        args: Arguments; `{host}` stands for the address at which the machine is reached.
        devices: Its GPUs; None: GPUs are not assigned.
        gpus: Number of GPUs that Ray reserves, where they are not assigned.
        placement: Where Ray starts a process without `devices`: on any node, spread over the
            nodes, or on the driver's node.
    """

    name: str
    module: str
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    devices: Devices | None = None
    gpus: float = 0.0
    placement: Literal["any", "spread", "driver"] = "any"


class Process(RankProcess, Protocol):
    """A started program; `ready` raises kinds of `ProcessError`.

    It raises `LostProcessError` if a signal ended the program, if its node is gone, or if it exited
    by itself while the kernel of its machine ended a process for memory, as an engine's.
    """

    @property
    def name(self) -> str:
        """The name in its spec."""
        ...

    @property
    def node(self) -> str:
        """The name of the machine that it was started on."""
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
