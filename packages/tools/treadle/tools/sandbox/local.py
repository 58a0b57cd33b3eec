"""The sandbox of this machine: a limited number of places, a bounded queue, warm interpreters.

Invariant: at most `places` programs run at one time and at most `queue` wait, in order of arrival;
one more is refused at once with a retry delay. A place is freed when every process
of its program is gone, also when the caller is cancelled. An interpreter serves one program.

Who waits: callers, for a place; a caller that leaves wakes the next. The one task of the sandbox
keeps `warm` interpreters ready; it waits until one was taken and a place is idle, so that under
load programs have the processor for themselves and start cold.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, Self

from treadle.agent_loop import SetupError
from treadle.tools.sandbox.execution import (
    Execution,
    Program,
    RunStatus,
    SandboxBusyError,
    SandboxError,
    UnsupportedProgramError,
)
from treadle.tools.sandbox.isolation.bubblewrap import Bubblewrap, explain, find_bubblewraps
from treadle.tools.sandbox.isolation.cgroups import ROOM_MIB, Cgroups, own_cgroup
from treadle.tools.sandbox.isolation.host_files import HostFiles, find_host_files
from treadle.tools.sandbox.isolation.seccomp import UnsupportedMachineError, compile_filter
from treadle.tools.sandbox.isolation.worker import SCRIPTS, WorkerProcess
from treadle.tools.sandbox.limits import SandboxLimits

_log = logging.getLogger(__name__)
_RECENT: Final = 64
_CHECK: Final = Program(code="print(6 * 7)", timeout_s=20)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxStats:
    """Counts of one `LocalSandbox`.

    Attributes:
        places: Programs that may run at one time.
        waiting: Number that wait for a place.
        started_warm: Number of them in a warm interpreter.
        refused: Programs refused because the queue was full.
        failed: Programs of which nobody knows what came: the sandbox's fault.
        worst_case_mib: Memory that the running programs can have together.
        memory_cgroups: Whether the kernel bounds the memory of each program, with what it holds for
            it itself.
    """

    places: int
    running: int
    waiting: int
    warm: int
    started: int
    started_warm: int
    refused: int
    failed: int
    worst_case_mib: int
    memory_cgroups: bool


class LocalSandbox:
    """Runs programs with bubblewrap.

    Args:
        places: Programs at one time; None: two for each core that this process may use, since a
            program that starts waits as much as it computes.
        packages: Distributions that programs can import, with what those require.
        preload: Modules that a warm interpreter has imported; none need `packages`.
        cgroup: A directory of the cgroup file system for this sandbox alone, in which each program
            gets a cgroup that bounds its memory; "auto": one below the cgroup of this process where
            the kernel lets it make one; None: only the limits' own means bound it.

    Raises:
        ValueError: A number is negative, or `places` is 0.
    """

    def __init__(
        self,
        *,
        limits: SandboxLimits | None = None,
        places: int | None = None,
        queue: int = 1024,
        warm: int = 2,
        packages: Sequence[str] = ("numpy", "sympy"),
        preload: Sequence[str] = ("numpy", "sympy"),
        cgroup: Path | Literal["auto"] | None = "auto",
    ) -> None:
        self.limits = limits or SandboxLimits()
        self._num_places = 2 * len(os.sched_getaffinity(0)) if places is None else places
        if self._num_places < 1:
            raise ValueError(f"places is {places}; it must be at least 1")
        for name, value in (("queue", queue), ("warm", warm)):
            if value < 0:
                raise ValueError(f"{name} is {value}; it must be at least 0")
        self._queue = queue
        self._warm_wanted = warm
        self._packages = tuple(packages)
        self._preload = tuple(preload)
        self._cgroup = cgroup
        self._cgroups: Cgroups | None = None
        self._places = asyncio.Semaphore(self._num_places)
        self._running = self._waiting = 0
        self._warm: deque[WorkerProcess] = deque()
        self._changed = asyncio.Event()
        self._all_warm = asyncio.Event()
        self._recent_s: deque[float] = deque([1.0], maxlen=_RECENT)
        self._started = self._started_warm = self._refused = self._failed = 0
        self._stack = AsyncExitStack()
        self._launcher: Bubblewrap | None = None
        self._filter = b""
        self._files: HostFiles | None = None

    async def __aenter__(self) -> Self:
        """Finds a bubblewrap that works, by running a program with it.

        Raises:
            SetupError: None works here; the message has each one's error and the fix.
        """
        try:
            self._filter = compile_filter()
        except UnsupportedMachineError as error:
            raise SetupError(f"the sandbox does not run on this machine: {error}") from error
        self._files = find_host_files(self._packages)
        async with AsyncExitStack() as stack:
            if isinstance(self._cgroup, str):
                parent = stack.enter_context(own_cgroup())
            else:
                parent = self._cgroup
            if parent is not None:
                self._cgroups = Cgroups(parent, memory_mib=self.limits.memory_mib)
            self._launcher = await self._first_that_works(stack, self._files)
            if self._warm_wanted:
                keeper = asyncio.create_task(self._keep_warm(), name="warm interpreters")
                stack.push_async_callback(self._end, keeper)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Ends the warm interpreters; programs under way end with their callers."""
        self._launcher = None
        await self._stack.aclose()

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages that it runs."""
        assert self._files is not None, "the sandbox was not entered"
        return self._files.languages

    def stats(self) -> SandboxStats:
        """Counts as of now."""
        return SandboxStats(
            places=self._num_places,
            running=self._running,
            waiting=self._waiting,
            warm=len(self._warm),
            started=self._started,
            started_warm=self._started_warm,
            refused=self._refused,
            failed=self._failed,
            worst_case_mib=self._num_places * self._worst_case_mib(),
            memory_cgroups=self._cgroups is not None,
        )

    def _worst_case_mib(self) -> int:
        if self._cgroups is not None:
            return min(self.limits.memory_mib + ROOM_MIB, self.limits.worst_case_mib)
        return self.limits.worst_case_mib

    async def until_warm(self) -> None:
        """Waits until all interpreters that are kept ready are."""
        await self._all_warm.wait()

    async def run(self, program: Program) -> Execution:
        """Runs a program once a place is free.

        Raises:
            UnsupportedProgramError: Its language, a file name or a limit is not accepted.
            SandboxBusyError: The queue is full.
            SandboxError: The sandbox failed.
        """
        self._check(program)
        if self._places.locked() and self._waiting >= self._queue:
            self._refused += 1
            raise SandboxBusyError(
                f"{self._running} programs run and {self._waiting} wait, which is the limit",
                retry_after_s=self._retry_after_s(),
            )
        arrived = time.monotonic()
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        queue_s = time.monotonic() - arrived
        self._running += 1
        try:
            return replace(await self._run(program), queue_s=queue_s)
        except UnsupportedProgramError:
            raise
        except SandboxError:
            self._failed += 1
            raise
        finally:
            self._recent_s.append(time.monotonic() - arrived - queue_s)
            self._running -= 1
            self._places.release()
            self._changed.set()

    async def _run(self, program: Program) -> Execution:
        assert self._launcher is not None, "the sandbox was not entered, or was left"
        self._started += 1
        if program.language == "python" and (worker := await self._take_warm()):
            self._started_warm += 1
        else:
            worker = await self._start(self._launcher, preload=())
        return await worker.run(program)

    async def _take_warm(self) -> WorkerProcess | None:
        while self._warm:
            worker = self._warm.popleft()
            self._all_warm.clear()
            self._changed.set()
            if worker.alive:
                return worker
            await worker.kill()
        return None

    async def _start(self, launcher: Bubblewrap, *, preload: tuple[str, ...]) -> WorkerProcess:
        return await WorkerProcess.start(
            launcher, self._filter, self.limits, preload=preload, cgroups=self._cgroups
        )

    async def _keep_warm(self) -> None:
        """Fills up while a place is idle; ends only by cancellation."""
        while True:
            self._changed.clear()
            while len(self._warm) < self._warm_wanted and not self._places.locked():
                assert self._launcher is not None
                try:
                    worker = await self._start(self._launcher, preload=self._preload)
                except SandboxError as error:
                    # Programs can do without; a broken sandbox tells every one of them.
                    _log.warning("no warm interpreter until the next program: %s", error)
                    break
                self._warm.append(worker)
            if len(self._warm) == self._warm_wanted:
                self._all_warm.set()
            await self._changed.wait()

    async def _end(self, keeper: asyncio.Task[None]) -> None:
        keeper.cancel()
        try:
            await asyncio.wait([keeper])
        finally:  # the signals first: cancelled or not, nobody stays
            ending = [asyncio.create_task(worker.kill()) for worker in self._warm]
            self._warm.clear()
            if ending:
                await asyncio.wait(ending)

    async def _first_that_works(self, stack: AsyncExitStack, files: HostFiles) -> Bubblewrap:
        reasons = []
        sandboxes = self._num_places + self._warm_wanted
        for bubblewrap in find_bubblewraps():
            async with AsyncExitStack() as trial:
                try:
                    launcher = await trial.enter_async_context(
                        Bubblewrap(bubblewrap, files, self.limits, sandboxes=sandboxes)
                    )
                    await self._try(launcher)
                except (SetupError, SandboxError) as error:
                    reasons.append(f"{bubblewrap}: {explain(str(error))}")
                    continue
                stack.push_async_exit(trial.pop_all())
                return launcher
        raise SetupError(
            "the sandbox cannot isolate programs on this machine and refuses to run them "
            "without. " + " | ".join(reasons)
        )

    async def _try(self, launcher: Bubblewrap) -> None:
        worker = await self._start(launcher, preload=self._preload)
        execution = await worker.run(_CHECK)
        if execution.status is not RunStatus.FINISHED or execution.stdout != "42\n":
            raise SandboxError(f"a first program ended otherwise than it should: {execution}")

    def _check(self, program: Program) -> None:
        limits = self.limits
        if program.language not in self.languages:
            raise UnsupportedProgramError(
                f"language {program.language!r} is not run here; "
                f"there are: {', '.join(self.languages)}"
            )
        if program.timeout_s > limits.timeout_s:
            raise UnsupportedProgramError(
                f"a time-out of {program.timeout_s:g} s is longer than the {limits.timeout_s:g} s "
                "that this sandbox allows; ask for less, or start it with more"
            )
        if (program.memory_limit_mib or 0) > limits.memory_mib:
            raise UnsupportedProgramError(
                f"{program.memory_limit_mib} MiB are more than the {limits.memory_mib} MiB that "
                "this sandbox allows; ask for less, or start it with more"
            )
        for names in (program.files, program.fetch_files):
            if len(names) > limits.entries:
                raise UnsupportedProgramError(
                    f"{len(names)} files are more than the {limits.entries} that this sandbox "
                    "allows; give fewer, or start it with more"
                )
        for name in program.files:
            if not _leads_inside(name):
                raise UnsupportedProgramError(
                    f"the file name {name!r} must be relative and lead into the work directory"
                )
        for name in program.fetch_files:
            if not _leads_inside(name.lstrip("/")):
                raise UnsupportedProgramError(
                    f"the name {name!r} of a file to fetch must be that of a file in the work "
                    "directory or, absolute, in the sandbox, without '..'"
                )
        if SCRIPTS[program.language] in map(os.path.normpath, program.files):
            raise UnsupportedProgramError(
                f"{SCRIPTS[program.language]!r} is the program's own file; name yours otherwise"
            )

    def _retry_after_s(self) -> float:
        mean_s = sum(self._recent_s) / len(self._recent_s)
        return max(1.0, math.ceil(self._waiting * mean_s / self._num_places))


def _leads_inside(name: str) -> bool:
    """Returns whether a name is one that can be below the work directory."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    outside = name.startswith("/") or ".." in name.split("/")
    return bool(name) and not outside and "\0" not in name
