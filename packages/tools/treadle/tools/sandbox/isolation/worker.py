"""One sandboxed interpreter: started, with libraries imported on request, and used for one program.

Invariant: a worker runs one program at most, and when `run` or `kill` returns no process of it is
alive, whatever the program forked: process 1 of its namespace has ended, and with it the kernel
ended the others. Its output is limited in size, and trusted only as text. A program that has run
is over when process 1 is, never when its pipes are: see `capture`.

Who waits: `start` for the interpreter (and its imports), `run` for the program, at most its
timeout plus `_GRACE_S`; a cancellation kills.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import io
import marshal
import math
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from treadle.tools.sandbox.execution import (
    Execution,
    Program,
    RunStatus,
    SandboxError,
    UnsupportedProgramError,
)
from treadle.tools.sandbox.isolation.bubblewrap import Bubblewrap
from treadle.tools.sandbox.isolation.capture import Capture
from treadle.tools.sandbox.isolation.cgroups import Cgroup, Cgroups
from treadle.tools.sandbox.isolation.host_files import PACKAGES
from treadle.tools.sandbox.limits import SandboxLimits

SCRIPTS: Final[Mapping[str, str]] = {"python": "main.py", "bash": "main.sh"}
"""The name of the program's file, by language."""
_GUEST: Final = Path(__file__).with_name("guest.py")
_START_TIMEOUT_S: Final = 60.0
_GRACE_S: Final = 2.0
_ROOM: Final = 1 << 16
_READY: Final = b"ready\n"
_UNPLACED: Final = "unplaced"
_REASONS: Final = {
    "memory": "the memory limit of {memory_mib} MiB for all processes and files was exceeded",
    "entries": "the limit of {entries} files and directories was exceeded",
    "output": "the limit of {output_kib} KiB of output was exceeded",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """The end of the program: the supervisor's report, or our own after we killed it."""

    ended_for: str
    return_code: int = -signal.SIGKILL
    execution_s: float = math.inf
    files: Mapping[str, bytes] = field(default_factory=dict)


class _Outputs:
    """The three pipes that a sandbox writes to, and whether it is over."""

    def __init__(self, stdout: int, stderr: int, reports: int, limits: SandboxLimits) -> None:
        self.over = asyncio.Event()
        limit = limits.output_kib << 10
        self.stdout = Capture(stdout, limit, self.over)
        self.stderr = Capture(stderr, limit, self.over)
        most_reported = 2 * (limits.disk_mib << 20) + _ROOM  # base64 of the files, and the rest
        self.reports = Capture(reports, most_reported, self.over)

    @property
    def full(self) -> bool:
        """Whether one of them had more than its limit."""
        return self.stdout.full or self.stderr.full or self.reports.full

    def close(self) -> None:
        """Takes the rest of each, and lets go of them."""
        for capture in (self.stdout, self.stderr, self.reports):
            capture.close()


class WorkerProcess:
    """Use `start`; then `run` once, or `kill`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        outputs: _Outputs,
        limits: SandboxLimits,
        info: io.FileIO,
        *,
        warm: bool,
        give_back_user: Callable[[], None],
    ) -> None:
        self._process = process
        self._give_back_user = give_back_user
        self._outputs = outputs
        self._limits = limits
        self._info = info
        self._warm = warm
        self._supervisor: int | None = None
        self._pid = 0  # of the supervisor
        self._cgroup: Cgroup | None = None
        self._over_bound = False
        self._ended = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        launcher: Bubblewrap,
        filter_program: bytes,
        limits: SandboxLimits,
        *,
        preload: tuple[str, ...],
        cgroups: Cgroups | None = None,
    ) -> Self:
        """Starts an interpreter and waits until it can take a program.

        Args:
            filter_program: The system calls that are refused.
            cgroups: Where the program gets a cgroup; None: it has none.

        Raises:
            SandboxError: It did not start; the message has its error output.
        """
        spawning = asyncio.create_task(cls._spawn(launcher, filter_program, limits, preload))
        try:
            worker = await asyncio.shield(spawning)
        except asyncio.CancelledError:
            # asyncio would kill bubblewrap alone, see `_signal`.
            with contextlib.suppress(SandboxError):
                await (await spawning).kill()
            raise
        reports = worker._outputs.reports
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                began = await reports.until(_READY)
        except TimeoutError:
            await worker.kill()
            raise SandboxError(f"the sandbox did not start in {_START_TIMEOUT_S:g} s") from None
        except BaseException:
            await worker.kill()
            raise
        if not began or not worker._find_supervisor():
            why = await worker._last_words()
            raise SandboxError(f"the sandbox did not start: {why}")
        del reports.kept[: len(_READY)]
        if cgroups is not None:
            try:
                worker._cgroup = cgroups.make()
                worker._cgroup.add(worker._pid)
            except OSError as error:
                await worker.kill()
                raise SandboxError(f"the sandbox did not get a cgroup: {error}") from error
        return worker

    @classmethod
    async def _spawn(
        cls,
        launcher: Bubblewrap,
        filter_program: bytes,
        limits: SandboxLimits,
        preload: tuple[str, ...],
    ) -> Self:
        with contextlib.ExitStack() as opened, contextlib.ExitStack() as failed:
            try:
                user = launcher.take_user()
                give_back_user = functools.partial(launcher.give_back_user, user)
                failed.callback(give_back_user)
                filter_fd, filter_writer = _pipe(opened, opened)
                # Not a pipe: bubblewrap would die of writing to one that nobody reads any more,
                # and its child, which waits for it, would stay.
                info = failed.enter_context(io.FileIO(os.memfd_create("info"), "r+"))
                # Not asyncio's pipes, which it waits for: see `capture`.
                stdout, stdout_writer = _pipe(failed, opened)
                stderr, stderr_writer = _pipe(failed, opened)
                reports, reports_writer = _pipe(failed, opened)
                os.write(filter_writer, filter_program)
                settings = {"packages": PACKAGES, "preload": preload, "status_fd": reports_writer}
                arguments = ["-I", "-S", "-B", "-c", _guest(), _text(marshal.dumps(settings))]
                process = await asyncio.create_subprocess_exec(
                    *launcher.command(
                        arguments, user=user, filter_fd=filter_fd, info_fd=info.fileno()
                    ),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=stdout_writer,
                    stderr=stderr_writer,
                    pass_fds=(filter_fd, info.fileno(), reports_writer, *launcher.inherited_fds),
                    start_new_session=True,
                )
            except OSError as error:  # no descriptor, process or memory is left
                raise SandboxError(f"the sandbox did not start: {error}") from error
            failed.pop_all()
        outputs = _Outputs(stdout, stderr, reports, limits)
        return cls(
            process, outputs, limits, info, warm=bool(preload), give_back_user=give_back_user
        )

    def _find_supervisor(self) -> bool:
        """Takes hold of process 1, and watches for its end; returns whether it still was there."""
        said = os.pread(self._info.fileno(), 4096, 0)
        found = re.search(rb'"child-pid": (\d+)', said)
        assert found is not None, f"bubblewrap did not name its child: {said[:200]!r}"
        self._pid = int(found.group(1))
        try:
            supervisor = os.pidfd_open(self._pid)
        except ProcessLookupError:
            return False
        loop = asyncio.get_running_loop()

        def at_end() -> None:
            loop.remove_reader(supervisor)
            self._ended.set()
            self._outputs.over.set()

        loop.add_reader(supervisor, at_end)
        self._supervisor = supervisor
        return True

    @property
    def alive(self) -> bool:
        """Whether its process has not ended."""
        return self._process.returncode is None

    async def kill(self) -> None:
        """Ends every process of it; returns when they are gone, also when cancelled."""
        if self._ending is None:
            self._signal()
            self._ending = asyncio.create_task(self._gone())
        try:
            await asyncio.shield(self._ending)
        except asyncio.CancelledError:
            await self._ending
            raise

    async def _gone(self) -> None:
        """Returns when process 1 has ended, which it does after all others of its namespace."""
        process = self._process
        assert process.stdin is not None
        process.stdin.close()
        if self._supervisor is not None:
            await self._ended.wait()
            os.close(self._supervisor)
        else:  # and so no program has run
            await self._outputs.reports.until_end()
        await process.wait()
        if self._cgroup is not None:
            self._over_bound = self._cgroup.exceeded()
            self._cgroup.remove()
        self._outputs.close()
        self._info.close()
        # What its sockets hold in flight, memory and a share of its user's counts, is collected
        # when some Unix socket of the host is closed: this one.
        socket.socket(socket.AF_UNIX).close()
        self._give_back_user()

    async def run(self, program: Program) -> Execution:
        """Runs the program; afterwards the worker is used up.

        Raises:
            UnsupportedProgramError: Its files do not fit, or their names contradict each other.
            SandboxError: The worker died, or its report is invalid.
        """
        outputs = self._outputs
        stdin = self._process.stdin
        assert stdin is not None
        began = time.monotonic()
        timed_out = False
        try:
            async with asyncio.timeout(program.timeout_s + _GRACE_S):
                stdin.write(self._job(program))
                stdin.close()
                await outputs.over.wait()
        except TimeoutError:
            # Both may come at once, after this process stood still.
            timed_out = not outputs.over.is_set()
        finally:
            await self.kill()
        seconds = time.monotonic() - began
        stdout, stderr = outputs.stdout.text(), outputs.stderr.text()
        if timed_out:
            report = _Report(ended_for="time")
        elif self._over_bound:
            report = _Report(ended_for="memory")
        elif outputs.full:
            report = _Report(ended_for="output")
        else:
            report = self._believable(bytes(outputs.reports.kept), stderr)
            if report.ended_for == _UNPLACED:
                raise UnsupportedProgramError(
                    f"its code, input and files cannot be placed: {stderr}"
                )
        return self._execution(program, report, stdout, stderr, seconds)

    def _signal(self) -> None:
        """SIGKILL to process 1, whom bubblewrap collects; before that is known, to the group.

        To the group and not to bubblewrap alone: its child waits for it at first, and would for
        ever. Later the child has its own session, and ends with bubblewrap or with its input.
        """
        with contextlib.suppress(ProcessLookupError):
            if self._supervisor is not None:
                signal.pidfd_send_signal(self._supervisor, signal.SIGKILL)
            elif self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _believable(self, said: bytes, stderr: str) -> _Report:
        """Returns the supervisor's final report, whose form is checked."""
        if not said:
            raise SandboxError(f"the sandbox ended before its program did: {stderr[-500:]!r}")
        try:
            first, *rest = said.decode("ascii").splitlines()
            return_code, ended_for, took_s = first.split()
            if ended_for not in ("itself", "time", _UNPLACED, *_REASONS) or len(rest) % 2:
                raise ValueError(f"{ended_for!r}, {len(rest)} lines of files")
            parts = [base64.b64decode(line, validate=True) for line in rest]
            names = (name.decode() for name in parts[::2])
            return _Report(
                return_code=int(return_code),
                ended_for=ended_for,
                execution_s=float(took_s),
                files=dict(zip(names, parts[1::2], strict=True)),
            )
        except ValueError as error:
            raise SandboxError(
                f"the supervisor in the sandbox sent {said[:80]!r}: {error}"
            ) from error

    def _job(self, program: Program) -> bytes:
        limits = self._limits
        memory_mib = program.memory_limit_mib or limits.memory_mib
        job = {
            "code": program.code,
            "language": program.language,
            "script": SCRIPTS[program.language],
            "stdin": program.stdin,
            "files": dict(program.files),
            "fetch_files": program.fetch_files,
            "max_fetch_bytes": limits.disk_mib << 20,
            "timeout_s": program.timeout_s,
            "memory_bytes": memory_mib << 20,
            "max_entries": limits.entries,
            "nice": limits.nice,
            "rlimits": limits.rlimits(memory_mib=memory_mib, timeout_s=program.timeout_s),
        }
        return marshal.dumps(job)

    def _execution(
        self, program: Program, report: _Report, stdout: str, stderr: str, seconds: float
    ) -> Execution:
        if report.ended_for in _REASONS:
            numbers = {
                "memory_mib": program.memory_limit_mib or self._limits.memory_mib,
                "entries": self._limits.entries,
                "output_kib": self._limits.output_kib,
            }
            why = _REASONS[report.ended_for].format(**numbers)
            stderr += f"\nThe sandbox ended the program: {why}.\n"
        timed_out = report.ended_for == "time"
        return Execution(
            status=RunStatus.TIMED_OUT if timed_out else RunStatus.FINISHED,
            stdout=stdout,
            stderr=stderr,
            return_code=None if timed_out else report.return_code,
            execution_s=min(report.execution_s, seconds),
            files=report.files,
            warm=self._warm,
        )

    async def _last_words(self) -> str:
        stderr = self._outputs.stderr
        await stderr.until(b"\n")
        await self.kill()
        said = stderr.text().strip()
        return said or f"it ended with exit code {self._process.returncode} and said nothing"


@functools.cache
def _guest() -> str:
    """Returns `guest.py`, compiled, as a line of Python; the interpreter inside is the same."""
    code = compile(_GUEST.read_text(encoding="utf-8"), "<sandbox>", "exec", dont_inherit=True)
    packed = _text(marshal.dumps(code))
    return f"import binascii,marshal;exec(marshal.loads(binascii.a2b_base64({packed!r})))"


def _pipe(readers: contextlib.ExitStack, writers: contextlib.ExitStack) -> tuple[int, int]:
    """Both ends of a pipe, each closed with its stack."""
    reader, writer = os.pipe()
    readers.callback(os.close, reader)
    writers.callback(os.close, writer)
    return reader, writer


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
