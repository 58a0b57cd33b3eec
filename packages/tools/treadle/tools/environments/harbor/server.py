"""`python -m treadle.tools.environments.harbor.server`: forks a process for each trial.

A line of standard input starts a trial (`id`, `path`, `settings`, `environment`, `folder`) or ends
one (`end`); a line of standard output reports that a trial has ended. A trial writes its output,
and at its end its reward, to files of its folder.

Invariant: a trial is reported only after every process that it started has ended, its room's too.

Who waits: the server, for input and for the end of its forks; a fork, for its trial and then for
all that the trial started.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from treadle.tools.environments.harbor.trial import EXPECTED, run_trial
from treadle.tracing.child_process import kill_descendants

_IMPORTED: Final = (
    "harbor.agents.terminus_2",
    "harbor.llms.lite_llm",
    "harbor.trial.multi_step",
    "harbor.trial.single_step",
    "treadle.tools.environments.harbor.environment",
)
"""Modules that each trial would import, for seconds."""
_SET_CHILD_SUBREAPER: Final = 36


def serve() -> None:
    """Runs trials until standard input ends."""
    for name in _IMPORTED:
        importlib.import_module(name)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    running: dict[int, tuple[int, int]] = {}  # a descriptor of the fork: its number, its process
    pending = b""
    while True:
        for descriptor, _ in poll.poll():
            if descriptor:
                number, pid = running.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                sys.stdout.write(json.dumps({"id": number, "status": status}) + "\n")
                sys.stdout.flush()
                continue
            if not (data := os.read(0, 1 << 16)):
                return
            *lines, pending = (pending + data).split(b"\n")
            for job in map(json.loads, lines):
                if "end" in job:
                    for number, pid in running.values():
                        if number == job["end"]:
                            os.kill(pid, signal.SIGTERM)
                    continue
                pid = _forked(partial(_watch, job))
                fork = os.pidfd_open(pid)
                running[fork] = (job["id"], pid)
                poll.register(fork, select.POLLIN)


def _forked(do: Callable[[], int]) -> int:
    """Returns the process id of a fork that ends with the status that `do` returns."""
    # Until there is a handler for it, in the fork.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    if pid := os.fork():
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    status = 1
    try:
        status = do()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _watch(job: Mapping[str, Any]) -> int:
    """Runs a trial in a fork; returns its status when all that it started has ended.

    SIGTERM ends all of it.
    """
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    trial = _forked(partial(_trial, job))
    signal.signal(signal.SIGTERM, lambda *_: kill_descendants())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    status: int | None = None
    while True:
        try:
            pid, ended = os.wait()
        except ChildProcessError:
            return 1 if status is None else status
        if pid == trial:
            status = min(abs(os.waitstatus_to_exitcode(ended)), 255)
        if status is not None:
            kill_descendants()


def _trial(job: Mapping[str, Any]) -> int:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    folder = Path(job["folder"])
    with open(os.devnull) as nothing, open(folder / "output", "w") as output:
        os.dup2(nothing.fileno(), 0)
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.environ.update(job["environment"])
    tempfile.tempdir = str(folder)

    try:
        reward = asyncio.run(run_trial(Path(job["path"]), job["settings"], folder))
    except EXPECTED as error:
        sys.stderr.write(f"\n{type(error).__name__}: {error}\n")
        return 1
    (folder / "reward").write_text(str(reward))
    return 0


if __name__ == "__main__":
    serve()
