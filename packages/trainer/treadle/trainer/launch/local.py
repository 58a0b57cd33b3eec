"""The local launcher: starts children of this process on this machine.

Children run the interpreter of this process with its import path, or a command in another
environment. They print into `directory`. They and everything that they started end with the
launcher, and with this process, however it ends (`treadle.tracing.child_process`).
"""

import asyncio
import json
import logging
import os
import platform
import shutil
import signal
import sys
from pathlib import Path
from typing import Self

from treadle.tracing.child_process import end_now, program_of, supervised
from treadle.trainer.launch.environment import child_environment, foreign_environment
from treadle.trainer.launch.gpus import visible_devices
from treadle.trainer.launch.process import (
    LostProcessError,
    ProcessError,
    ProcessSpec,
    child_python_path,
)
from treadle.trainer.launch.run_tls import RunTls

__all__ = ["KILLED_S", "LocalLauncher", "LocalProcess", "describe_exit", "read_tail"]

_READY_POLL_S = 0.05
_LITTLE = 64 << 10
"""Bytes of free disk below which a log may have lost its end."""
# A killed process ends at once, unless the kernel waits for a disk or a device.
KILLED_S = 10.0
_SIGNALS = range(1, 65)
_USAGE = 2
"""Exit status of a program that does not understand its arguments."""
_VMSTAT = Path("/proc/vmstat")
_log = logging.getLogger(__name__)


def describe_exit(status: int) -> str:
    """Returns `exited with status 3`, or the name of the signal that ended the process."""
    if status < 0:
        return f"was ended by {_name_of(-status)}"
    if status - 128 in _SIGNALS:
        return f"exited with status {status}, as after {_name_of(status - 128)}"
    return f"exited with status {status}"


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _was_killed(status: int) -> bool:
    """Whether a signal ended a process, or what it ran: a shell then exits with 128 + n."""
    return status < 0 or status - 128 in _SIGNALS


def _oom_kills() -> int:
    """Returns how many processes this machine's kernel has killed for lack of memory.

    Processes of other programs count too. Returns 0 if the kernel does not report the number.
    """
    try:
        text = _VMSTAT.read_text(encoding="ascii")
    except OSError:
        return 0
    for line in text.splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return int(count)
    return 0


def _told_of_memory(kills: int) -> str:
    what = "a process" if kills == 1 else f"{kills} processes"
    return f"the kernel ended {what} of that machine for memory"


def read_tail(path: Path, lines: int) -> str:
    """Returns the last lines of a log."""
    with path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - 16_384))
        text = log.read().decode(errors="replace")
    tail = "\n".join(text.splitlines()[-lines:])
    free = shutil.disk_usage(path.parent).free
    if free < _LITTLE:
        lost = f"({free} bytes are free on the disk of {path.parent}: make room)"
        return f"{tail}\n{lost}" if tail else lost
    return tail or "(it is empty)"


class LocalProcess:
    """A child of this process."""

    def __init__(
        self,
        spec: ProcessSpec,
        directory: Path,
        *,
        executable: str = sys.executable,
        python_path: str | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            directory: Where the log and the ready file go.
            python_path: PYTHONPATH of the child; None: that of this process.
        """
        self.name = spec.name
        self.log_path = directory / f"{spec.name}.log"
        self._ready_path = directory / f"{spec.name}.ready"
        self._spec = spec
        self._executable = executable
        self._python_path = child_python_path() if python_path is None else python_path
        self._child: asyncio.subprocess.Process | None = None
        self._oom_kills = 0

    async def start(self, host: str) -> None:
        """Starts it; called once.

        Raises:
            ProcessError: The interpreter or the command cannot be run.
        """
        self._ready_path.unlink(missing_ok=True)
        args = [argument.replace("{host}", host) for argument in self._spec.args]
        own = ["--ready_file", str(self._ready_path)]
        command, devices = self._spec.command, self._spec.devices
        shown = {} if devices is None else visible_devices(devices.indices, os.environ)
        extra = {**shown, **self._spec.env}
        if command:
            environment = foreign_environment(command[0], extra)
        else:
            command = (self._executable, "-P", "-m", self._spec.module)
            environment = child_environment(self._python_path, extra)
        self._oom_kills = _oom_kills()
        with self.log_path.open("ab") as log:
            try:
                self._child = await asyncio.create_subprocess_exec(
                    *supervised([*command, *args, *own], environment=environment),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    # Ctrl-C reaches only the driver, which then ends each child.
                    start_new_session=True,
                )
            except OSError as error:
                raise ProcessError(f"{self.name}: cannot run {command[0]}: {error}") from error

    @property
    def node(self) -> str:
        """See `Process.node`."""
        return platform.node()

    @property
    def pid(self) -> int:
        """The process id of the program."""
        assert self._child is not None
        return program_of(self._child.pid)

    async def ready(self, deadline_s: float) -> str:
        """See `Process.ready`."""
        try:
            async with asyncio.timeout(deadline_s):
                while not self._ready_path.exists():
                    assert self._child is not None
                    if (status := self._child.returncode) is not None:
                        kills = 0 if status == _USAGE else _oom_kills() - self._oom_kills
                        # A process that exits by itself has refused its input, and would again;
                        # unless it lost one that it had started, as an engine's.
                        kind = LostProcessError if _was_killed(status) or kills else ProcessError
                        meanwhile = "" if not kills else f", while {_told_of_memory(kills)}"
                        raise kind(
                            f"{self.name} {self.describe_end(status)} before it served{meanwhile}; "
                            f"{self.log_path} ends with:\n{await self.log_tail()}"
                        )
                    await asyncio.sleep(_READY_POLL_S)
        except TimeoutError:
            raise ProcessError(
                f"{self.name} on node {self.node} did not serve within {deadline_s:g} s; "
                f"{self.log_path} ends with:\n{await self.log_tail()}"
            ) from None
        return str(json.loads(self._ready_path.read_text(encoding="utf-8"))["address"])

    async def wait(self) -> int:
        """See `Process.wait`."""
        assert self._child is not None
        return await self._child.wait()

    def describe_end(self, status: int) -> str:
        """See `Process.describe_end`."""
        return f"{describe_exit(status)} on node {self.node}"

    async def log_tail(self, lines: int = 20) -> str:
        """See `Process.log_tail`."""
        return read_tail(self.log_path, lines)

    async def stop(self, grace_s: float = 10.0) -> None:
        """See `Process.stop`."""
        if self._child is None:
            return
        if self._child.returncode is None:
            self._child.terminate()
            try:
                async with asyncio.timeout(grace_s):
                    await self._child.wait()
            except TimeoutError:
                end_now(self._child)
        try:
            async with asyncio.timeout(KILLED_S):
                await self._child.wait()
        except TimeoutError:
            _log.warning(
                "%s (pid %d) does not end, %g s after SIGKILL: the kernel waits for a disk or a "
                "device; it is left behind",
                self.name,
                self.pid,
                KILLED_S,
            )


class LocalLauncher:
    """Starts processes on this machine."""

    host = "127.0.0.1"
    tls: RunTls | None = None  # nothing leaves this machine

    def __init__(self, directory: Path) -> None:
        """Args: directory: For the logs; made if missing."""
        self._directory = directory
        self._processes: list[LocalProcess] = []

    async def __aenter__(self) -> Self:
        """Makes the directory."""
        self._directory.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Ends every process that still runs, all at once."""
        await asyncio.gather(*(process.stop() for process in self._processes))

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        """See `Launcher.start`."""
        process = LocalProcess(spec, self._directory)
        self._processes.append(process)
        await process.start(self.host)
        return process
