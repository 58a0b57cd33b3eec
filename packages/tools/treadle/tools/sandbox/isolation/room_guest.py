"""Process 1 of a room: runs commands one after the other or together until its input ends.

Invariant: a command is a child that holds nothing of this process (no descriptor above 2, no way
to signal or trace it), and when this process ends, the kernel ends every process of the room. It
ends when its input does, or when the room is over a limit, which it then names on standard error.

It is compiled outside the room and run by `python -c`, after `guest.py`, whose watch it uses. A
command and its result are one line of JSON each; the host does not trust results. A command's
output goes to files, so that no reader waits for processes that the command leaves behind.

Who waits: the main thread for input, one thread per command for its end, and one that looks every
`_WATCH_S` at what all processes use and collects those that nobody waits for.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO, Any

_WATCH_S = 0.25
_PR_SET_DUMPABLE = 4
_PASSWD = "root:x:0:0:root:/root:/bin/bash\n"
_GROUP = "root:x:0:\n"


def serve(settings: dict[str, Any], excess: Callable[[dict[str, Any]], str | None]) -> None:
    """Runs the commands from standard input until it ends.

    Args:
        excess: Returns the limit in `settings` that all processes together exceed, if any.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # /proc/1 is closed to the commands
    for path, text in (("/etc/passwd", _PASSWD), ("/etc/group", _GROUP)):
        with open(path, "w") as file:
            file.write(text)
    for name, value in settings["rlimits"].items():
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
    os.nice(settings["nice"])
    tempfile.tempdir = settings["outputs"]
    _say({"ready": True})
    threading.Thread(target=_watch, args=(settings, excess), daemon=True).start()
    for line in sys.stdin.buffer:
        threading.Thread(target=_run, args=(json.loads(line), settings), daemon=True).start()
    os._exit(0)


_commands: set[int] = set()
_speaking = threading.Lock()
_starting = threading.Lock()


def _say(answer: dict[str, Any]) -> None:
    with _speaking:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _run(command: dict[str, Any], settings: dict[str, Any]) -> None:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        answer: dict[str, Any] = {"id": command["id"], "return_code": 126, "timed_out": False}
        try:
            with tempfile.TemporaryFile() as stdin:
                stdin.write(base64.b64decode(command["stdin"]))
                stdin.seek(0)
                with _starting:
                    process = subprocess.Popen(
                        command["argv"],
                        stdin=stdin,
                        stdout=out,
                        stderr=err,
                        cwd=command["cwd"],
                        env=command["env"],
                        start_new_session=True,
                    )
                    _commands.add(process.pid)
            try:
                answer["return_code"] = process.wait(command["timeout_s"])
            except subprocess.TimeoutExpired:
                answer["timed_out"] = True
                os.killpg(process.pid, signal.SIGKILL)
                answer["return_code"] = process.wait()
            _commands.discard(process.pid)
        except OSError as error:  # no such directory or program, or no room or process left
            err.write(f"{error}\n".encode())
        _say(answer | {"out": _text(out, settings), "err": _text(err, settings)})


def _text(file: IO[bytes], settings: dict[str, Any]) -> str:
    file.seek(0)
    return base64.b64encode(file.read(settings["max_output"] + 1)).decode()


def _watch(settings: dict[str, Any], excess: Callable[[dict[str, Any]], str | None]) -> None:
    while True:
        time.sleep(_WATCH_S)
        if (over := excess(settings)) is not None:
            sys.stderr.write(f"{over}\n")
            sys.stderr.flush()
            os._exit(1)
        with _starting:
            left = {int(name) for name in os.listdir("/proc") if name.isdigit()} - _commands - {1}
            for pid in left:
                with contextlib.suppress(ChildProcessError):  # another's, which collects it
                    os.waitpid(pid, os.WNOHANG)
