"""What a program starts ends with it and with its owner, detached or not."""

import math
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from treadle.tracing.child_process import ENDS_BY_ITSELF, end_now, program_of, supervised

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the means")

_LONG_S = 60.0

# Tells its own pid and those of a child of its own session and of a double fork, and then holds
# the interpreter's lock for longer than anybody waits.
_PROGRAM = """
import os, re, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
told, tell = os.pipe()
for detach in ("setsid", "double fork"):
    if os.fork() == 0:
        os.setsid()
        if detach == "double fork" and os.fork():
            os._exit(0)
        os.write(tell, b"%d " % os.getpid())
        signal.pause()
pids = b""
while pids.count(b" ") < 2:
    pids += os.read(told, 100)
os.write(1, b"%d %s\\n" % (os.getpid(), pids))
re.match(r"(a+)+$", "a" * 40 + "b")
"""

_OWNER = """
import subprocess, sys, signal
from treadle.tracing.child_process import supervised
subprocess.Popen(supervised([sys.executable, "-c", sys.argv[1]]), start_new_session=True)
signal.pause()
"""


def _start(*command: str, stderr: int | None = None) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
    )


def _pidfds(process: "subprocess.Popen[bytes]") -> list[int]:
    """Takes hold of the processes that the program names in its first line."""
    assert process.stdout is not None
    return [os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()]


def _wait_gone(pidfds: list[int]) -> None:
    until = time.monotonic() + _LONG_S
    for pidfd in pidfds:
        left_ms = (until - time.monotonic()) * 1000
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        assert poller.poll(max(0, left_ms)), "a process is left"
        os.close(pidfd)


def test_all_that_a_program_started_ends_when_its_owner_is_killed() -> None:
    with _start(sys.executable, "-c", _OWNER, _PROGRAM) as owner:
        there = _pidfds(owner)
        assert len(there) == 3
        owner.kill()
        _wait_gone(there)


def test_all_that_a_program_started_ends_now() -> None:
    with _start(*supervised([sys.executable, "-c", _PROGRAM])) as process:
        there = _pidfds(process)
        process.terminate()  # which the program ignores
        end_now(process)
        assert process.wait() == -signal.SIGKILL
    _wait_gone(there)


def test_all_that_ignores_sigterm_ends_after_the_grace() -> None:
    with _start(*supervised([sys.executable, "-c", _PROGRAM], grace_s=0.05)) as process:
        there = _pidfds(process)
        process.terminate()
        assert process.wait() == -signal.SIGKILL
    _wait_gone(there)


@pytest.mark.parametrize(
    ("end", "status"), [("exit 5", 5), ("kill -11 $$", -11), ("kill -9 $$", -9)]
)
def test_a_program_ends_with_its_status_and_what_it_left(end: str, status: int) -> None:
    program = f"setsid sleep 1000 & echo $!; {end}"
    with _start(*supervised(["sh", "-c", program])) as process:
        there = _pidfds(process)
        assert process.wait() == status
    _wait_gone(there)


def test_a_killed_supervisor_takes_the_program_along() -> None:
    with _start(*supervised(["sh", "-c", "echo $$; exec sleep 1000"])) as process:
        assert process.stdout is not None
        program = int(process.stdout.readline())
        assert program_of(process.pid) == program
        there = [os.pidfd_open(program)]
        process.kill()
        _wait_gone(there)


@pytest.mark.parametrize(("grace_s", "told"), [(math.inf, b""), (_LONG_S, b"child\n")])
def test_sigterm_reaches_the_program_or_its_group(grace_s: float, told: bytes) -> None:
    child = "trap 'echo child; exit' TERM; echo up; while :; do sleep 1000 & wait; done"
    # Its own trap first: "up" is read when the child has set the other.
    command_line = f"trap '{'wait; ' if told else ''}exit 3' TERM; ({child}) & wait"
    command = supervised(["sh", "-c", command_line], grace_s=grace_s)
    with _start(*command) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.terminate()
        assert process.wait() == 3
        assert process.stdout.read() == told


def test_what_cleans_up_afterwards_is_left_to_end_by_itself() -> None:
    ((variable, value),) = ENDS_BY_ITSELF.items()
    # It is spared from when it runs with its variable; the program ends after that.
    cleaner = f"{variable}={value} setsid sh -c 'echo up; read line; echo cleaned'"
    command = supervised(["sh", "-c", f"trap 'exit 0' TERM; exec 3<&0; {cleaner} <&3 & wait"])
    with _start(*command) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.terminate()
        assert process.wait() == 0
        assert process.communicate(b"\n")[0] == b"cleaned\n"


def test_a_program_that_cannot_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: 'nonesuch'"):
        supervised(["nonesuch"], environment={"PATH": "/usr/bin"})
    program = tmp_path / "program"
    program.write_text("no program")
    program.chmod(0o700)
    with _start(*supervised([str(program)]), stderr=subprocess.PIPE) as process:
        _, told = process.communicate()
        assert told == f"cannot run {program}: Exec format error\n".encode()
        assert process.returncode == 127
