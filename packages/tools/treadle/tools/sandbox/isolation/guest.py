"""The supervisor inside the sandbox, which is process 1 and runs exactly one program.

Invariant: the program is a child that holds nothing of the supervisor's (no descriptor above 2,
no way to signal or trace process 1), and when the supervisor ends, the kernel ends every process
of the sandbox. It ends when no reader of its report is left. Its report is untrusted outside: a
wrong result is the worst that it can cause.

It is compiled outside and passed to `python -c`, never imported inside. Every program pays for its
imports, so it avoids `json` (which needs `re`), `signal` (needs `enum`) and `typing`.

    ready -> (one job on descriptor 0) -> fork, watch, kill all, read files -> result -> end

Who waits: the supervisor, for the job, then for its child with a look every `_WATCH_S` at the
clock and at what the program uses.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import atexit
import binascii
import builtins
import ctypes
import gc
import io
import marshal
import os
import resource
import select
import stat
import sys
import time
import types

TYPE_CHECKING = False
if TYPE_CHECKING:  # every import is paid for by every program
    from collections.abc import Iterator
    from typing import Any, NoReturn

_WORK = "/tmp/run"
_WRITABLE = ("/tmp", "/dev/shm")
_WATCH_S = 0.05
_PR_SET_DUMPABLE = 4
_MOST_DESCRIPTORS = 1 << 20


def supervise(settings: dict[str, Any]) -> dict[str, Any]:
    """Serves one job and ends."""
    os.closerange(3, settings["status_fd"])
    os.closerange(settings["status_fd"] + 1, _MOST_DESCRIPTORS)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # /proc/1/mem is closed to the program
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which process 1 does not get from within
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    sys.path.append(settings["packages"])
    for name in settings["preload"]:
        __import__(name)
    gc.freeze()  # the child's collections leave the pages alone that it shares with process 1
    _say(settings["status_fd"], b"ready\n")
    message = sys.stdin.buffer.read()
    if not message:
        os._exit(0)
    job: dict[str, Any] = marshal.loads(message)  # from our own side, of the same version
    try:
        stdin = _place(job)
    except (OSError, RecursionError) as error:  # the second by a name of a thousand directories
        sys.stderr.write(str(error)[:500])
        sys.stderr.flush()
        _say(settings["status_fd"], b"0 unplaced 0\n")
        os._exit(0)
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _confine(stdin, job)
        return job
    reader = select.poll()
    reader.register(settings["status_fd"], 0)  # tells of one thing: that it has gone
    return_code, ended_for = _watch(child, job, began + job["timeout_s"], reader)
    took_s = time.monotonic() - began
    _say(settings["status_fd"], f"{return_code} {ended_for} {took_s:.6f}\n".encode())
    for name, content in _fetch(job["fetch_files"], job["max_fetch_bytes"]):
        for part in (name.encode(), content):
            _say(settings["status_fd"], binascii.b2a_base64(part))
    os._exit(0)


def _say(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _place(job: dict[str, Any]) -> int:
    """Writes what the program finds when it begins; the descriptor of its input."""
    os.mkdir(_WORK)
    os.chdir(_WORK)
    for name, content in job["files"].items():
        _write(name, content)
    _write(job["script"], job["code"].encode("utf-8", "surrogatepass"))
    return _stdin(job["stdin"])


def _write(name: str, content: bytes) -> None:
    path = os.path.join(_WORK, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)


def _stdin(text: str | None) -> int:
    if text is None:
        return os.open("/dev/null", os.O_RDONLY)
    descriptor = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _confine(stdin: int, job: dict[str, Any]) -> None:
    """The child's side of the fork: limits that no one can raise again."""
    # As any other process, so that `_proportional_bytes` can be read.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    os.dup2(stdin, 0)
    os.closerange(3, _MOST_DESCRIPTORS)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.nice(job["nice"])
    for name, value in job["rlimits"].items():
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))


def _watch(
    child: int, job: dict[str, Any], deadline: float, reader: select.poll
) -> tuple[int, str]:
    """Waits for the child, or for a reason to end it; afterwards nothing else is alive."""
    ended_for: str | None = None
    status: int | None = None
    while status is None and ended_for is None:
        left = deadline - time.monotonic()
        signal.sigtimedwait([signal.SIGCHLD], min(max(left, 0.0), _WATCH_S))
        status = _reap(child)  # also after the deadline: it may have ended before it
        if reader.poll(0):
            os._exit(1)  # and the kernel ends the others
        if status is None:
            ended_for = "time" if left <= 0 else _excess(job)
    _kill_all()
    while True:
        try:
            pid, last = os.wait()
        except ChildProcessError:
            break
        if pid == child and status is None:
            status = last
    assert status is not None
    return os.waitstatus_to_exitcode(status), ended_for or "itself"


def _kill_all() -> None:
    try:
        os.kill(-1, signal.SIGKILL)  # everything but process 1
    except ProcessLookupError:
        return


def _reap(child: int) -> int | None:
    """Reaps dead processes; returns the child's status once it is among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == child:
            return status
        if pid == 0:
            return None


def _excess(job: dict[str, Any]) -> str | None:
    """Returns the limit that all processes together are over, if any."""
    used = entries = 0
    for path in _WRITABLE:
        disk = os.statvfs(path)
        used += (disk.f_blocks - disk.f_bfree) * disk.f_bsize
        entries += disk.f_files - disk.f_ffree
    if entries > job["max_entries"]:
        return "entries"
    pids = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    seen = {pid: _private_bytes(pid) for pid in pids}
    if used + sum(private for _, private in seen.values()) <= job["memory_bytes"]:
        return None
    # Pages shared since a fork count once in this, which is slower to read.
    proportional = sum(_proportional_bytes(pid, task) for pid, (task, _) in seen.items())
    return "memory" if used + proportional > job["memory_bytes"] else None


def _private_bytes(pid: str) -> tuple[str, int]:
    """Returns a task through which a process's memory is seen, and how much it is.

    The first thread, which has the number of the process, shows none once it has ended, while the
    others keep it. Threads that start each other and end are followed until one is caught. A
    process whose every thread has ended or is about to has none.
    """
    tasks, seen = {pid}, set[str]()
    while new := tasks - seen:
        for task in new:
            size, resident, shared = _pages(task)
            if size:
                return task, (resident - shared) * resource.getpagesize()
        seen |= new
        try:
            tasks = set(os.listdir(f"/proc/{pid}/task"))
        except OSError:  # it ended meanwhile
            break
    return pid, 0


def _pages(task: str) -> tuple[int, int, int]:
    """Returns how many pages it has: in its address space, in memory, and of files."""
    try:
        with open(f"/proc/{task}/statm") as file:
            size, resident, shared = file.read().split()[:3]
    except OSError:  # it ended meanwhile
        return 0, 0, 0
    return int(size), int(resident), int(shared)


def _proportional_bytes(pid: str, task: str) -> int:
    try:
        with open(f"/proc/{task}/smaps_rollup") as file:
            for line in file:
                if line.startswith("Pss_Anon:"):
                    return int(line.split()[1]) * 1024
    except OSError:  # ended, or hides its memory map: then it counts in full
        pass
    return _private_bytes(pid)[1]


def _fetch(names: tuple[str, ...], budget: int) -> Iterator[tuple[str, bytes]]:
    """Regular files, as long as they fit; nobody can change them now.

    A relative name is one below the work directory. An absolute one may be any file that the
    program could read, so none of `/proc`, which describes this process. The kernel follows at most
    40 links, because a program may leave any number.
    """
    proc = os.stat("/proc").st_dev
    for name in names:
        try:
            descriptor = os.open(os.path.join(_WORK, name), os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            about = os.fstat(descriptor)
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            allowed = os.path.isabs(name) or path.startswith(_WORK + "/")
            readable = allowed and stat.S_ISREG(about.st_mode) and about.st_dev != proc
            if readable and about.st_size <= budget:
                budget -= about.st_size
                with open(descriptor, "rb", closefd=False) as file:
                    yield name, file.read()
        finally:
            os.close(descriptor)


def run(job: dict[str, Any]) -> NoReturn:
    """Runs the program in this process, as if the interpreter had been started with it, and ends.

    The interpreter's own end is left out: taking hundreds of imported modules apart takes longer
    than most programs.
    """
    path = os.path.join(_WORK, job["script"])
    if job["language"] == "bash":
        os.execv("/bin/bash", ["bash", path])
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    sys.argv[:] = [path]
    sys.path.insert(0, _WORK)
    sys.stdin = io.TextIOWrapper(io.FileIO(0), encoding="utf-8", errors="surrogateescape")
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    status = 0
    try:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except SystemExit as end:
        status = _exit_status(end.code)
    except BaseException as error:
        status = 1
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != path:
            trace = trace.tb_next  # our own frames
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    module.__dict__.clear()  # which runs the `__del__` of what it held
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (AttributeError, OSError, ValueError):
            status = status or 120  # as the interpreter does
    os._exit(status)


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


if __name__ == "__main__":
    _host = sys.modules["__main__"]  # kept: the program's module takes its place
    run(supervise(marshal.loads(binascii.a2b_base64(sys.argv[1]))))
