"""A room: one sandbox that stays, in which commands run as in a container.

Invariant: files, processes and terminals of one command are there for the next. Nothing of a room
is on the host's disk: what commands write is in memory, within `SandboxLimits`. When `__aexit__`
returns, every process of the room is gone, and with them its files. Files go in and out through a
process inside, so that no link of the room's leads the host anywhere.

    async with Room() as room:
        result = await room.run(["bash", "-c", "echo 42 > /root/answer"])

The whole `/usr` of this machine is there, read-only. Commands are user 0, without any right over
the host: outside they are a user that nobody else is.

Who waits: `run`, for the command. Cancelling it leaves the command until the room ends.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import io
import itertools
import json
import marshal
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from treadle.agent_loop import SetupError
from treadle.tools.sandbox.execution import SandboxError
from treadle.tools.sandbox.isolation.bubblewrap import Bubblewrap, explain, find_bubblewraps
from treadle.tools.sandbox.isolation.cgroups import Cgroup, Cgroups, own_cgroup
from treadle.tools.sandbox.isolation.host_files import find_root_files
from treadle.tools.sandbox.isolation.seccomp import compile_filter
from treadle.tools.sandbox.limits import SandboxLimits

ROOM_LIMITS: Final = SandboxLimits(
    memory_mib=2048, processes=512, disk_mib=1024, entries=200_000, open_files=1024
)
"""The limits of a room: more than those of one program, less than those of a container."""
ROOM_ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
)
"""The environment that every command of a room has."""
_ISOLATION: Final = Path(__file__).with_name("isolation")
_START_TIMEOUT_S: Final = 60.0
_NO_WORDS: Final = "it gave no reason"
_MAX_OUTPUT: Final = 64 << 20
_LINE: Final = 4 * _MAX_OUTPUT
# Its code comes by its input, so that those who list the processes inside see a short line.
_BOOT: Final = """\
import base64, json, marshal, sys
names = {"__name__": "room"}
for code in marshal.loads(base64.b64decode(sys.stdin.buffer.readline())):
    exec(code, names)
names["serve"](json.loads(sys.argv[1]), names["_excess"])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomResult:
    """The result of a command.

    Attributes:
        return_code: Its exit status, or minus the number of the signal that ended it.
        timed_out: Whether it was ended because its time was over.
    """

    return_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool


class Room:
    """Runs commands between its `__aenter__` and its `__aexit__`.

    Args:
        network: Whether commands have the host's network, with all that listens on it.
    """

    def __init__(self, *, limits: SandboxLimits = ROOM_LIMITS, network: bool = False) -> None:
        self._limits = limits
        self._network = network
        self._stack = contextlib.AsyncExitStack()
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: int | None = None
        self._cgroup: Cgroup | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def __aenter__(self) -> Self:
        """Opens the room with the first bubblewrap that works.

        Raises:
            SetupError: No bubblewrap works here; the message has the error and fix of each.
        """
        reasons = []
        for bubblewrap in find_bubblewraps():
            async with contextlib.AsyncExitStack() as stack:
                try:
                    await self._open(stack, bubblewrap)
                except (SetupError, SandboxError) as error:
                    reasons.append(f"{bubblewrap}: {explain(str(error))}")
                    continue
                self._stack = stack.pop_all()
                return self
        raise SetupError("the sandbox cannot isolate commands here. " + " | ".join(reasons))

    async def __aexit__(self, *exc_info: object) -> None:
        """Ends all processes of the room."""
        await self._stack.aclose()

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str = "/",
        environment: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        stdin: bytes = b"",
    ) -> RoomResult:
        """Runs a command to its end; what it leaves running stays.

        Args:
            argv: Program and arguments; no shell. A command that cannot begin is return code 126,
                with the reason on stderr: no such program, no process left, a NUL in an argument.
            environment: In addition to HOME, LANG and PATH.
            timeout_s: Wall-clock seconds until every process of its session is ended; None: no
                limit. Processes that began a session of their own (`setsid`) stay.

        Raises:
            SandboxError: The room is over a limit or closed, or the command printed too much.
        """
        process = self._process
        if process is None or process.stdin is None or process.stdin.is_closing():
            raise SandboxError("the room is closed")
        if problem := _problem(argv, cwd, environment or {}):
            return RoomResult(
                return_code=126, stdout=b"", stderr=f"{problem}\n".encode(), timed_out=False
            )
        number = next(self._numbers)
        command = {
            "id": number,
            "argv": list(argv),
            "cwd": cwd,
            "env": {**ROOM_ENVIRONMENT, **(environment or {})},
            "timeout_s": timeout_s,
            "stdin": base64.b64encode(stdin).decode(),
        }
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            with contextlib.suppress(ConnectionError):  # the reader of answers has the reason
                process.stdin.write(json.dumps(command).encode() + b"\n")
                await process.stdin.drain()
            found = await answer
        finally:
            del self._answers[number]
        return _result(found)

    async def _open(self, stack: contextlib.AsyncExitStack, bubblewrap: Path) -> None:
        limits = self._limits
        parent = stack.enter_context(own_cgroup())
        launcher = await stack.enter_async_context(
            Bubblewrap(bubblewrap, find_root_files(), limits, sandboxes=1)
        )
        user = launcher.take_user()
        # Not a pipe: bubblewrap would die of writing to one that nobody reads any more.
        info = stack.enter_context(io.FileIO(os.memfd_create("info"), "r+"))
        filter_program = stack.enter_context(io.FileIO(os.memfd_create("filter"), "r+"))
        filter_program.write(compile_filter(internet=True))
        filter_program.seek(0)
        fds = (info.fileno(), filter_program.fileno())
        command = launcher.room_command(
            ["-I", "-S", "-B", "-c", _BOOT, json.dumps(self._settings())],
            user=user,
            filter_fd=fds[1],
            info_fd=fds[0],
            network=self._network,
        )
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(*fds, *launcher.inherited_fds),
            start_new_session=True,
            limit=_LINE,
        )
        stack.push_async_callback(self._close, process)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(_guest())
        async with asyncio.timeout(_START_TIMEOUT_S):
            if b"ready" not in await process.stdout.readline():
                raise SandboxError(
                    f"the room did not open: {await _last_words(process) or _NO_WORDS}"
                )
        (pid,) = re.findall(rb'"child-pid": (\d+)', os.pread(info.fileno(), 4096, 0))
        self._supervisor = os.pidfd_open(int(pid))
        if parent is not None:
            self._cgroup = Cgroups(parent, memory_mib=limits.memory_mib).make()
            self._cgroup.add(int(pid))
        self._process = process
        self._reading = asyncio.create_task(self._read(process), name="answers of a room")

    def _settings(self) -> dict[str, object]:
        limits = self._limits
        rlimits = limits.rlimits(memory_mib=limits.memory_mib, timeout_s=limits.timeout_s)
        # Commands of a room share memory and time, which the watch and the caller bound.
        shared = {name: value for name, value in rlimits.items() if name not in ("AS", "CPU")}
        return {
            "rlimits": shared,
            "nice": limits.nice,
            "memory_bytes": limits.memory_mib << 20,
            "max_entries": limits.entries,
            "max_output": _MAX_OUTPUT,
        }

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        why = "the room ended"
        try:
            while line := await process.stdout.readline():
                answer = json.loads(line)
                if (waiting := self._answers.get(answer["id"])) and not waiting.done():
                    waiting.set_result(answer)
            why = f"the room ended: {self._reason(await _last_words(process))}"
        except (KeyError, TypeError, ValueError) as error:
            why = f"process 1 of the room sent what it must not: {error}"
        assert process.stdin is not None
        process.stdin.close()
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(SandboxError(why))

    def _reason(self, words: str) -> str:
        limits = {"memory": f"memory_mib {self._limits.memory_mib}"}
        limits["entries"] = f"entries {self._limits.entries}"
        if not words and self._cgroup is not None and self._cgroup.exceeded():
            words = "memory"
        return f"over the limit {limits[words]}" if words in limits else words or _NO_WORDS

    async def _close(self, process: asyncio.subprocess.Process) -> None:
        """Ends process 1, by the end of its input, and with it every other one."""
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if self._supervisor is not None:  # the last process of the room to end
            ended, loop = asyncio.Event(), asyncio.get_running_loop()
            loop.add_reader(self._supervisor, ended.set)
            await ended.wait()
            loop.remove_reader(self._supervisor)
            os.close(self._supervisor)
            self._supervisor = None
        if self._reading is not None:
            await self._reading
        if self._cgroup is not None:
            self._cgroup.remove()


async def _last_words(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    return (await process.stderr.read(4096)).decode(errors="replace").strip()


def _problem(argv: Sequence[str], cwd: str, environment: Mapping[str, str]) -> str | None:
    """Returns why no program can be given this, if so."""
    if not argv:
        return "the command is empty"
    given = [("argument", text) for text in argv] + [("working directory", cwd)]
    given += [("environment variable", f"{name}={value}") for name, value in environment.items()]
    for what, text in given:
        try:
            nul = b"\0" in text.encode()
        except UnicodeEncodeError:
            return f"the {what} {text!a:.80} has half of a surrogate pair, which is no text"
        if nul:
            return f"the {what} {text!r:.80} has a NUL character, which no program can be given"
    return None


def _result(answer: Mapping[str, Any]) -> RoomResult:
    out, err = (base64.b64decode(answer[name]) for name in ("out", "err"))
    if max(len(out), len(err)) > _MAX_OUTPUT:
        raise SandboxError(f"a command printed more than {_MAX_OUTPUT >> 20} MiB")
    return RoomResult(
        return_code=int(answer["return_code"]),
        stdout=out,
        stderr=err,
        timed_out=bool(answer["timed_out"]),
    )


@functools.cache
def _guest() -> bytes:
    """Returns the program of process 1 as a line; the interpreter inside is the same."""
    parts = [
        compile((_ISOLATION / name).read_text(encoding="utf-8"), f"<{name}>", "exec")
        for name in ("guest.py", "room_guest.py")
    ]
    return base64.b64encode(marshal.dumps(parts)) + b"\n"
