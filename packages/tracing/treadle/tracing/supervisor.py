"""The process between an owner and one program that it starts; see `child_process`.

Invariant: when this process ends, no process of the program is left, detached ones included. It
ends with the program, with its owner, or when it gets SIGUSR1. The kernel gives it every orphan
below it (it is a subreaper), and ends the program if this process itself is killed.

It runs as a script and waits for one `poll`. It imports only what starts fast: no `signal`, no
`pathlib`.

    python -I -S supervisor.py OWNER_PID GRACE_S PROGRAM ARGUMENT...
"""

import _signal  # type: ignore[import-not-found]  # `signal` makes enums, for 5 ms
import ctypes
import errno
import os
import select
import sys
import time

SPARED = "TREADLE_ENDS_BY_ITSELF"
"""A variable of processes that clean up after the program, and end by themselves."""

_SET_PDEATHSIG, _SET_DUMPABLE, _SET_CHILD_SUBREAPER = 1, 4, 36
_CAUGHT = (_signal.SIGTERM, _signal.SIGUSR1, _signal.SIGCHLD)
_IGNORED_BY_PYTHON = (_signal.SIGPIPE, _signal.SIGXFSZ)
_AGAIN_S, _LAST_AGAIN_S = 0.025, 2.0
_NEVER, _LONG_MS = float("inf"), 1 << 30
_CANNOT_RUN = 127
_library = ctypes.CDLL(None)


def supervise(owner_pid: int, grace_s: float, command: "list[str]") -> int:
    """Runs the command to its end; returns its wait status; SIGKILL's if it never ran.

    Args:
        grace_s: Seconds from SIGTERM, for the program's process group then, to SIGKILL for
            everything; infinite: SIGTERM is for the program alone.
    """
    _library.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    owner = os.pidfd_open(owner_pid)
    if os.getppid() != owner_pid:  # it has ended, and its number may be another's
        return int(_signal.SIGKILL)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    _signal.set_wakeup_fd(wake)
    _signal.pthread_sigmask(_signal.SIG_BLOCK, _CAUGHT)  # or the program misses one before it runs
    for number in _CAUGHT:
        _signal.signal(number, lambda *_: None)
    program = _start(command)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _CAUGHT)
    _let_go_of_files({2, owner, woken, wake})
    poller = select.poll()
    poller.register(owner, select.POLLIN)
    poller.register(woken, select.POLLIN)
    status: int = _signal.SIGKILL
    again_s = _AGAIN_S
    look_at = _NEVER
    ending = False
    while True:
        left_s = max(look_at - time.monotonic(), 0.0)
        ready = {descriptor for descriptor, _ in poller.poll(min(left_s * 1000, _LONG_MS))}
        signals = os.read(woken, 4096) if woken in ready else b""
        if owner in ready:
            poller.unregister(owner)
        if _signal.SIGTERM in signals and not ending:
            os.kill(program if grace_s == _NEVER else -program, _signal.SIGTERM)
            look_at = min(look_at, time.monotonic() + grace_s)
        ending |= owner in ready or _signal.SIGUSR1 in signals or time.monotonic() >= look_at
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == program:
                    status, ending = ended[1], True
        except ChildProcessError:
            return status
        if ending:
            if not kill_descendants():
                return status
            look_at = time.monotonic() + again_s
            again_s = min(2 * again_s, _LAST_AGAIN_S)


def _start(command: "list[str]") -> int:
    """Returns the process of the program, in a process group of its own."""
    supervisor = os.getpid()
    program = os.fork()
    if program == 0:
        os.setpgid(0, 0)
        _run(command, supervisor)
    try:
        os.setpgid(program, program)  # in both, so that neither depends on the other
    except OSError as error:
        assert error.errno == errno.EACCES, error  # the program has done it, and runs
    return program


def _run(command: "list[str]", supervisor: int) -> None:
    """In the child: becomes the program."""
    _library.prctl(_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:
        os._exit(_CANNOT_RUN)
    for number in (*_CAUGHT, *_IGNORED_BY_PYTHON):
        _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _CAUGHT)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot run {command[0]}: {error.strerror}\n".encode())
    os._exit(_CANNOT_RUN)


def _let_go_of_files(kept: "set[int]") -> None:
    """Closes what is the program's, so that who reads or writes it hears of its end."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError as error:
                if error.errno != errno.EBADF:  # that of the listing
                    raise


def kill_descendants() -> bool:
    """Sends SIGKILL to every process below this one; returns whether there is any."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            parent = _parent(name)
            children.setdefault(parent, []).append(int(name))
    found = False
    left = [os.getpid()]
    while left:
        for pid in children.get(left.pop(), ()):
            left.append(pid)
            try:
                if not _is_spared(pid):
                    os.kill(pid, _signal.SIGKILL)
                    found = True
            except OSError:
                pass  # it has ended, or became another user's
    return found


def _parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def _is_spared(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{SPARED}=".encode() in file.read()
    except OSError:
        return False


def _end_as(status: int) -> None:
    """Ends this process as the program ended."""
    if os.WIFSIGNALED(status):
        _library.prctl(_SET_DUMPABLE, 0, 0, 0, 0)  # a core file would be of this process
        number = os.WTERMSIG(status)
        if number != _signal.SIGKILL:
            _signal.signal(number, _signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _end_as(supervise(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
