"""Runs checks one after another, each in a separate process, and collects their outcomes.

Invariant: a check that fails, crashes or hangs stops only the checks that need it. A check that
cannot run is skipped with the reason and never counts as one that holds. When a check has ended, so
have its processes.
"""

import contextlib
import enum
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpu.check import Check, Context, Figures
from gpu.child import FAILED, SKIPPED, as_json

from treadle.trainer.launch.process import child_python_path

_TAIL_LINES = 15
_MEMORY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
_MEMORY_EVERY_S = 1.0


class Outcome(enum.Enum):
    """The outcome of a check."""

    HOLDS = "holds"
    FAILS = "FAILS"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A check and its outcome.

    Attributes:
        check: The check.
        outcome: Whether it holds.
        seen: Why it was skipped, or what was seen instead; "" if it holds.
        seconds: How long it ran.
        figures: What it measured.
    """

    check: Check
    outcome: Outcome
    seen: str = ""
    seconds: float = 0.0
    figures: Figures


def run_all(
    checks: Sequence[Check],
    context: Context,
    *,
    table: str = "gpu.checks",
    after_each: Callable[[Sequence[Result]], None],
    before: Sequence[Result] = (),
    seconds: float = math.inf,
) -> list[Result]:
    """Runs the checks in their order.

    Args:
        checks: In an order in which each comes after what it needs.
        context: Of all checks; each gets a directory of its `folder`.
        table: The module whose `CHECKS` has the checks, for the processes that run them.
        after_each: Gets all results so far.
        before: Results of an earlier call; their checks are not run.
        seconds: Time for all. A check that would take longer than is left is not begun, and one
            that has not ended by then is ended; neither has a result, but one that had three times
            its usual time fails, so that those after it have their turn in a later call.
    """
    ends_at = time.monotonic() + seconds
    results = list(before)
    outcomes = {result.check.name: result.outcome for result in results}
    for check in checks:
        left = ends_at - time.monotonic()
        if check.name in outcomes:
            continue
        if reason := _cannot_run(check, context, outcomes):
            result = Result(check=check, outcome=Outcome.SKIPPED, seen=reason, figures={})
        elif left <= (check.about_s if context.on_gpu else 0.0):
            continue
        else:
            own = replace(context, folder=context.folder / check.name)
            own.folder.mkdir(parents=True, exist_ok=True)
            found = _run(check, own, table, min(check.limit_s, left))
            if found is None:
                continue
            result = found
        outcomes[check.name] = result.outcome
        results.append(result)
        after_each(results)
    return results


def _cannot_run(check: Check, context: Context, outcomes: Mapping[str, Outcome]) -> str:
    """Returns why a check cannot run here; "" if it can."""
    if check.only_gpu and not context.on_gpu:
        return f"only a GPU shows it: {check.only_gpu}"
    if context.on_gpu and context.num_gpus < check.gpus:
        return f"needs {check.gpus} GPUs, and there are {context.num_gpus}"
    if check.engine and check.engine not in context.engines:
        return f"no environment of {check.engine} was named: --{check.engine} COMMAND"
    for name in check.needs:
        # A check that was not selected is taken to hold.
        if (outcome := outcomes.get(name, Outcome.HOLDS)) is not Outcome.HOLDS:
            return f"needs {name}, which {'fails' if outcome is Outcome.FAILS else 'was skipped'}"
    return ""


def _run(check: Check, context: Context, table: str, limit_s: float) -> Result | None:
    """Returns the result; None if the time of all checks ended before that of this one."""
    answer, log = context.folder / "result.json", context.folder / "log.txt"
    answer.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": child_python_path()}
    if not context.on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    began = time.monotonic()
    with log.open("w") as output, _peak_memory(context) as peak:
        status = _wait(
            [sys.executable, "-m", "gpu.child", table, check.name, as_json(context), str(answer)],
            environment,
            output.fileno(),
            limit_s,
        )
    seconds = time.monotonic() - began
    figures: Figures = {}
    if status is None and limit_s < min(check.limit_s, 3 * check.about_s):
        return None
    if status is None:
        outcome, seen = Outcome.FAILS, f"not done after {limit_s:.0f} s\n{_tail(log)}"
    elif not answer.is_file():
        outcome, seen = Outcome.FAILS, f"ended with status {status}\n{_tail(log)}"
    else:
        said = json.loads(answer.read_text())
        figures, seen = said["figures"], said["seen"]
        ends = {FAILED: Outcome.FAILS, SKIPPED: Outcome.SKIPPED}
        outcome = ends.get(status, Outcome.HOLDS)
    return Result(
        check=check,
        outcome=outcome,
        seen=seen,
        seconds=seconds,
        figures={**figures, **peak},
    )


def _wait(
    command: Sequence[str], environment: Mapping[str, str], output: int, limit_s: float
) -> int | None:
    """Runs a process in a separate process group; returns its status, None after the limit."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Its servers and ranks are children that end with it; this ends those that do not watch.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _peak_memory(context: Context) -> Iterator[Figures]:
    """Yields figures that get the most memory in use on one GPU while the block runs."""
    figures: Figures = {}
    if not context.on_gpu:
        yield figures
        return
    stop, most = threading.Event(), 0

    def sample() -> None:
        nonlocal most
        while not stop.wait(_MEMORY_EVERY_S):
            done = subprocess.run(_MEMORY, capture_output=True, text=True, check=False)
            used = (int(line) for line in done.stdout.split() if line.isdecimal())
            most = max([most, *used])

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield figures
    finally:
        stop.set()
        thread.join()
        figures["peak GPU memory, MiB"] = most


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:])
