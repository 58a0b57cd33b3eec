"""Processes that are slow, dead, cancelled, or given what cannot be sent to them."""

import asyncio
import os
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from treadle.agent_loop import load_import_path, time_limited
from treadle.agent_loop.time_limited import TimeLimited, TimeLimitedError, end_idle_processes

FUNCTIONS = """
import os, re, threading

def broken():
    raise ImportError("math-verify is missing")

def make():
    return answer

def answer(path):
    if path == "lock":
        return threading.Lock()
    if path == "huge":
        return 10 ** 5000
    if path == "pid":
        return os.getpid()
    if path == "integer":
        return 10 ** 10 ** 8
    with open(path, "w") as pipe:  # until someone reads
        pipe.write(str(os.getpid()))
    re.match(r"(a+)+$", "a" * 40 + "b")  # longer than anybody waits, with the lock held
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def named(path: Path, name: str) -> Callable[[object], object]:
    """What makes a function of the file, in the process."""
    make = load_import_path(f"{path}:{name}", "function")
    assert callable(make)
    return make()  # type: ignore[no-any-return]


def limited(
    path: Path, name: str = "make", *, timeout_s: float = 60
) -> TimeLimited[object, object]:
    return TimeLimited(partial(named, path, name), name="test", timeout_s=timeout_s, processes=1)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def busy_in(
    pipe: Path, function: TimeLimited[object, object]
) -> tuple[asyncio.Task[object], int]:
    """A call that has begun and never ends, and the process that it is in."""
    os.mkfifo(pipe)
    call = asyncio.create_task(function(str(pipe)))
    return call, int(await asyncio.to_thread(pipe.read_text))


@pytest.mark.asyncio
async def test_a_caller_that_is_cancelled_frees_its_process(functions: Path) -> None:
    function = limited(functions, timeout_s=600)
    call, pid = await busy_in(functions.parent / "pipe", function)
    waiting = asyncio.create_task(function("pid"))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(60):  # long before the limit of the first
        assert await waiting != pid
    assert not is_alive(pid)


@pytest.mark.asyncio
async def test_code_that_holds_the_lock_ends_at_its_limit_and_is_named(functions: Path) -> None:
    """Whoever ends it: its own limit, or a caller that waits no longer."""
    place = re.escape(str(functions)) + r":\d+, in answer"
    with pytest.raises(TimeoutError, match=f"it was at {place}"):
        await limited(functions, timeout_s=0.1)("integer")
    call, pid = await busy_in(functions.parent / "pipe", limited(functions))
    call.cancel()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await call
    assert re.search(place, cancelled.value.__notes__[0])
    assert not is_alive(pid)


@pytest.mark.asyncio
async def test_what_cannot_be_sent_is_an_error_and_costs_no_process(functions: Path) -> None:
    function = limited(functions)
    pid = await function("pid")
    with pytest.raises(TimeLimitedError, match="its argument cannot be pickled: TypeError"):
        await function(threading.Lock())
    with pytest.raises(TimeLimitedError, match="TypeError: cannot pickle"):
        await function("lock")
    assert await function("huge") == 10**5000
    assert await function("pid") == pid


@pytest.mark.asyncio
async def test_why_a_function_cannot_be_made_is_told(functions: Path) -> None:
    function = limited(functions, "broken")
    for _ in range(2):
        with pytest.raises(TimeLimitedError, match="cannot be made: ImportError: math-verify is"):
            await function("pid")


@pytest.mark.asyncio
async def test_a_process_that_starts_slowly_is_no_slow_call(
    functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_comes(_: object, timeout_s: float) -> list[object]:
        assert timeout_s == time_limited._START_S
        return []

    monkeypatch.setattr(time_limited, "wait", nothing_comes)
    with pytest.raises(TimeLimitedError, match="its process did not start within 120 s"):
        await limited(functions, timeout_s=1)("pid")


@pytest.mark.asyncio
async def test_idle_processes_end_with_a_run_and_another_run_starts_its_own(
    functions: Path,
) -> None:
    function = limited(functions)
    first = await function("pid")
    assert isinstance(first, int)
    before = len(os.listdir("/proc/self/fd"))
    await asyncio.to_thread(end_idle_processes)
    assert not is_alive(first)
    assert len(os.listdir("/proc/self/fd")) < before
    assert await function("pid") not in (None, first)
