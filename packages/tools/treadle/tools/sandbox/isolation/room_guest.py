"""Process 1 of a room: runs commands one after the other or together until its input ends.

Invariant: a command is a child that holds nothing of this process (no descriptor above 2, no way
to signal or trace it), and when this process ends, the kernel ends every process of the room. It
ends when its input does, or when the room is over a limit, which it then names on standard error.
Every command is answered, also one that cannot begin, and whatever earlier ones did: inputs and
outputs are pipes, so that no file, directory or disk of the commands is needed.

It is compiled outside the room and run by `python -c`, after `guest.py`, whose watch it uses. A
command and its result are one line of JSON each; the host does not trust results. Processes that a
command leaves behind may keep its outputs: what they print later is read and dropped.

Who waits: the main thread, for all input, output and ends of commands; and one thread that looks
every `_WATCH_S` at what all processes use and collects those that nobody waits for. Neither needs
a new thread later, which the commands could prevent.
"""

from __future__ import annotations

import array
import base64
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import termios
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO, Any

_WATCH_S = 0.25
_STOPPED_S = 1.0
_CHUNK = 1 << 16
_PART = 3 << 18  # its base64 needs no padding
_MOST_PASSES = 100
_PR_SET_DUMPABLE = 4
_PASSWD = "root:x:0:0:root:/root:/bin/bash\n"
_GROUP = "root:x:0:\n"


def serve(settings: dict[str, Any], excess: Callable[[dict[str, Any]], str | None]) -> None:
    """Runs the commands from standard input until it ends.

    Args:
        excess: Returns the limit in `settings` that all processes together exceed, if any.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # /proc/1 is closed to the commands
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which process 1 does not get from within
    for path, text in (("/etc/passwd", _PASSWD), ("/etc/group", _GROUP)):
        with open(path, "w") as file:
            file.write(text)
    for name, value in settings["rlimits"].items():
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
    os.nice(settings["nice"])
    # With vfork, a command that is stopped before its program begins would stop this process.
    subprocess._USE_VFORK = False  # type: ignore[misc]
    commands = _Commands(settings)
    threading.Thread(target=_watch, args=(settings, excess, commands), daemon=True).start()
    sys.stdout.write('{"ready": true}\n')
    sys.stdout.flush()
    commands.serve()


class _Command:
    """A process with its pipes and what it printed, of which `most` bytes and one more are kept."""

    def __init__(self, asked: dict[str, Any], most: int) -> None:
        self.number = asked["id"]
        self.input = memoryview(base64.b64decode(asked["stdin"]))
        self.outputs = {"out": bytearray(), "err": bytearray()}
        self.timed_out = False
        self._most = most
        self.process = subprocess.Popen(
            asked["argv"],
            bufsize=0,
            stdin=subprocess.PIPE if self.input else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=asked["cwd"],
            env=asked["env"],
            start_new_session=True,
        )
        try:
            self.pidfd = os.pidfd_open(self.process.pid)
            for _, pipe in self.pipes():
                os.set_blocking(pipe.fileno(), False)
        except OSError:
            self.process.kill()
            self.process.wait()
            for _, pipe in self.pipes():
                pipe.close()
            raise
        limit_s = asked["timeout_s"]
        self.deadline = None if limit_s is None else time.monotonic() + limit_s

    def pipes(self) -> Iterator[tuple[str, IO[bytes]]]:
        process = self.process
        for name, pipe in (("in", process.stdin), ("out", process.stdout), ("err", process.stderr)):
            if pipe is not None and not pipe.closed:
                yield name, pipe

    def held(self) -> int:
        """Returns the bytes of memory that its input and outputs take here."""
        return len(self.input) + sum(map(len, self.outputs.values()))

    def write(self, pipe: IO[bytes]) -> bool:
        """Writes what the pipe takes; returns whether there is more."""
        try:
            self.input = self.input[os.write(pipe.fileno(), self.input[:_CHUNK]) :]
        except BlockingIOError:
            return True
        except OSError:  # nobody reads it any more
            self.input = self.input[:0]
        return bool(self.input)

    def read(self, name: str, pipe: IO[bytes], most: int = _CHUNK) -> int:
        """Reads at most so many bytes; returns how many, 0 at the end."""
        try:
            data = os.read(pipe.fileno(), most)
        except BlockingIOError:
            return most
        kept = self.outputs[name]
        kept += data[: self._most + 1 - len(kept)]
        return len(data)

    def drain(self) -> None:
        """Reads what is in the outputs now; processes that it left may print without an end."""
        waiting = array.array("i", [0])
        for name, pipe in self.pipes():
            if name == "in":
                continue
            fcntl.ioctl(pipe.fileno(), termios.FIONREAD, waiting)
            left = waiting[0]
            while left > 0 and (count := self.read(name, pipe, min(left, _CHUNK))):
                left -= count


class _Commands:
    """The commands that run, and the outputs that ended ones left open."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._most = settings["max_output"]
        self._processes = settings["rlimits"]["NPROC"] - 1
        self._most_left = settings["rlimits"]["NOFILE"] // 4
        self._selector = selectors.DefaultSelector()
        self._parts: list[bytes] = []
        self._running: dict[int, _Command] = {}
        self._left: list[IO[bytes]] = []
        self.starting = threading.Lock()

    def held(self) -> int:
        """Returns the bytes of memory that inputs and outputs take here."""
        return sum(command.held() for command in list(self._running.values()))

    def pids(self) -> set[int]:
        """Returns the processes that `serve` collects."""
        return set(self._running)

    def serve(self) -> None:
        """Runs commands until the input ends, and then ends this process."""
        self._selector.register(0, selectors.EVENT_READ, self._hear)
        while True:
            for key, _ in self._selector.select(self._patience_s()):
                if self._selector.get_map().get(key.fd) is key:  # not closed meanwhile
                    key.data()
            for command in list(self._running.values()):
                if command.deadline is not None and command.deadline <= time.monotonic():
                    command.timed_out, command.deadline = True, None
                    _kill_session(command.process.pid)

    def _patience_s(self) -> float | None:
        deadlines = [c.deadline for c in self._running.values() if c.deadline is not None]
        return max(min(deadlines) - time.monotonic(), 0.0) if deadlines else None

    def _hear(self) -> None:
        data = os.read(0, 1 << 20)
        if not data:
            os._exit(0)
        *lines, rest = data.split(b"\n")
        for line in lines:
            whole = b"".join((*self._parts, line))
            self._parts.clear()
            self._begin(json.loads(whole))
        self._parts.append(rest)

    def _begin(self, asked: dict[str, Any]) -> None:
        try:
            with self.starting:
                command = _Command(asked, self._most)
                self._running[command.process.pid] = command
        except Exception as error:  # no such program, what no program can be given, no process left
            text = str(error)
            if isinstance(error, OSError) and error.errno == errno.EAGAIN:
                text += f": the room is at its limit of {self._processes} processes"
            _answer(asked["id"], 126, {"out": b"", "err": f"{text}\n".encode(errors="replace")})
            return
        self._selector.register(command.pidfd, selectors.EVENT_READ, lambda: self._finish(command))
        for name, pipe in command.pipes():
            event = selectors.EVENT_WRITE if name == "in" else selectors.EVENT_READ
            self._selector.register(pipe.fileno(), event, self._mover(command, name, pipe))

    def _mover(self, command: _Command, name: str, pipe: IO[bytes]) -> Callable[[], None]:
        def move() -> None:
            if not (command.write(pipe) if name == "in" else command.read(name, pipe)):
                self._close(pipe)

        return move

    def _close(self, pipe: IO[bytes]) -> None:
        self._selector.unregister(pipe.fileno())
        pipe.close()

    def _finish(self, command: _Command) -> None:
        self._selector.unregister(command.pidfd)
        os.close(command.pidfd)
        command.drain()
        return_code = command.process.wait()
        del self._running[command.process.pid]
        for name, pipe in command.pipes():
            if name == "in":
                self._close(pipe)
            else:
                self._leave(pipe)
        _answer(command.number, return_code, command.outputs, timed_out=command.timed_out)

    def _leave(self, pipe: IO[bytes]) -> None:
        """Drops what is printed to an output from now on."""

        def drop() -> None:
            with contextlib.suppress(BlockingIOError):
                if not os.read(pipe.fileno(), _CHUNK):
                    self._left.remove(pipe)
                    self._close(pipe)

        self._selector.modify(pipe.fileno(), selectors.EVENT_READ, drop)
        self._left.append(pipe)
        if len(self._left) > self._most_left:  # its writers get SIGPIPE; commands need descriptors
            self._close(self._left.pop(0))


def _answer(
    number: int, return_code: int, outputs: dict[str, Any], *, timed_out: bool = False
) -> None:
    head = json.dumps({"id": number, "return_code": return_code, "timed_out": timed_out})
    write = sys.stdout.buffer.write
    write(head[:-1].encode())
    for name, data in outputs.items():  # in parts, because memory is bounded
        write(f', "{name}": "'.encode())
        for start in range(0, len(data), _PART):
            write(base64.b64encode(data[start : start + _PART]))
        write(b'"')
    write(b"}\n")
    sys.stdout.buffer.flush()


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def _kill_session(session: int) -> None:
    """Ends a session's processes, again while there are new ones, up to `_MOST_PASSES` times."""
    for _ in range(_MOST_PASSES):
        members = [pid for pid in _pids() if _about(pid)[2] == session]
        if not members:
            return
        for pid in members:
            _kill(pid)
        time.sleep(0.001)


def _kill_stopped(commands: set[int]) -> None:
    """Ends a child that another process stopped before its program began."""
    for pid in set(_pids()) - commands:
        if _about(pid)[:2] == (b"T", os.getpid()):
            _kill(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _about(pid: int) -> tuple[bytes, int, int]:
    """Returns state, parent and session of a process; zeros if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent, _, session = file.read().rpartition(b")")[2].split()[:4]
    except (OSError, ValueError):  # it ended meanwhile
        return b"X", 0, 0
    return (state, 0, 0) if state in b"ZX" else (state, int(parent), int(session))


def _watch(
    settings: dict[str, Any], excess: Callable[[dict[str, Any]], str | None], commands: _Commands
) -> None:
    while True:
        time.sleep(_WATCH_S)
        free = settings["memory_bytes"] - commands.held()
        if (over := excess(settings | {"memory_bytes": free})) is not None:
            sys.stderr.write(f"{over}\n")
            sys.stderr.flush()
            os._exit(1)
        if commands.starting.acquire(timeout=_STOPPED_S):
            try:
                for pid in set(_pids()) - commands.pids():
                    with contextlib.suppress(ChildProcessError):  # another's, which collects it
                        os.waitpid(pid, os.WNOHANG)
            finally:
                commands.starting.release()
        else:
            _kill_stopped(commands.pids())
