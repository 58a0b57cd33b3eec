import asyncio
import subprocess
import sys
import threading
import weakref
from functools import partial

import pytest

from treadle.agent_loop import user_calls
from treadle.agent_loop.user_calls import call_user, end_if_cancelled, in_thread


class _AsyncObject:
    async def __call__(self, value: int) -> int:
        return value + threading.get_ident()


@pytest.mark.asyncio
async def test_plain_functions_run_beside_the_event_loop_and_async_ones_on_it() -> None:
    here = threading.get_ident()

    async def on_the_loop(value: int) -> int:
        return value + threading.get_ident()

    assert await call_user("f", partial(lambda value: value + threading.get_ident(), 1)) != here + 1
    assert await call_user("f", partial(on_the_loop, 1)) == here + 1
    assert await call_user("f", partial(_AsyncObject(), 1)) == here + 1
    assert await call_user("f", lambda: on_the_loop(1)) == here + 1


@pytest.mark.asyncio
async def test_plain_functions_run_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=60)
    await asyncio.gather(call_user("f", both.wait), call_user("f", both.wait))


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [SystemExit(0), ValueError("no"), StopIteration()])
@pytest.mark.parametrize("plain", [True, False])
async def test_what_it_raises_reaches_the_caller_alone(error: BaseException, plain: bool) -> None:
    def raises() -> None:
        raise error

    async def raises_later() -> None:
        raises()

    # StopIteration cannot leave a coroutine; Python turns it into a RuntimeError.
    expected = RuntimeError if isinstance(error, StopIteration) else type(error)
    with pytest.raises(expected):
        await call_user("f", raises if plain else raises_later)


@pytest.mark.asyncio
async def test_the_end_of_a_task_is_waited_for_when_it_cleans_up() -> None:
    began, cleaned = asyncio.Event(), False

    async def work() -> None:
        nonlocal cleaned
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned = True

    task = asyncio.create_task(end_if_cancelled("f", work()))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned


@pytest.mark.asyncio
async def test_a_task_that_swallows_its_cancellation_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(user_calls, "GRACE_S", 0.01)
    began, gate, left = asyncio.Event(), asyncio.Event(), []

    async def work() -> None:
        while not gate.is_set():
            began.set()
            try:
                await gate.wait()
            except asyncio.CancelledError:
                continue

    call = end_if_cancelled("the tool", work(), on_left_behind=lambda: left.append(1))
    task = asyncio.create_task(call)
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await task
    assert left == [1]
    assert cancelled.value.__notes__ == ["the tool did not end when it was cancelled"]
    assert "the tool did not end within 0.01 s after it was cancelled" in caplog.text
    gate.set()


@pytest.mark.asyncio
async def test_a_thread_serves_one_call_after_another_and_keeps_nothing_of_them() -> None:
    class Result:
        pass

    async def call() -> tuple[int, weakref.ref[Result]]:
        thread, made = await in_thread("f", lambda: (threading.get_ident(), Result()))
        return thread, weakref.ref(made)

    first, made = await call()
    second, _ = await call()
    assert first == second
    assert made() is None
    # More at once than threads that wait: each has one of its own.
    both = threading.Barrier(2, timeout=60)

    def meet() -> int:
        both.wait()
        return threading.get_ident()

    threads = await asyncio.gather(in_thread("f", meet), in_thread("f", meet))
    assert len(set(threads)) == 2


@pytest.mark.asyncio
async def test_a_thread_that_does_not_end_is_left_behind_and_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(user_calls, "GRACE_S", 0.0)
    gate = threading.Event()
    began = [threading.Event() for _ in range(user_calls._MAX_THREADS)]

    def hang(own: threading.Event) -> None:
        own.set()
        gate.wait(60)

    tasks = [asyncio.create_task(in_thread("f", partial(hang, own))) for own in began]
    for own in began:
        assert await asyncio.to_thread(own.wait, 60)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert await in_thread("g", lambda: 1) == 1
    assert "f did not end in time; its thread is left behind" in caplog.text
    gate.set()


@pytest.mark.asyncio
async def test_a_thread_that_ends_soon_after_its_caller_was_cancelled_is_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(user_calls, "GRACE_S", 0.05)
    began, gate = threading.Event(), threading.Event()
    task = asyncio.create_task(in_thread("f", lambda: (began.set(), gate.wait(60))))  # type: ignore[func-returns-value]
    assert await asyncio.to_thread(began.wait, 60)
    task.cancel()
    gate.set()
    await asyncio.wait([task])
    looked = asyncio.Event()
    asyncio.get_running_loop().call_later(0.06, looked.set)
    await looked.wait()
    assert not caplog.text


@pytest.mark.asyncio
async def test_a_thread_that_is_left_behind_serves_nobody_until_its_function_ends() -> None:
    began, gate, stuck = threading.Event(), threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        gate.wait(60)
        stuck.set()

    task = asyncio.create_task(in_thread("f", hang))
    assert await asyncio.to_thread(began.wait, 60)
    task.cancel()
    await asyncio.wait([task])
    for _ in range(3):
        assert await in_thread("g", lambda: stuck.is_set()) is False
    gate.set()


_HANGS = """
import asyncio, time
from treadle.agent_loop import user_calls

user_calls.GRACE_S = 0.01

def hang():
    time.sleep(1000)

async def swallow():
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass

async def main():
    for work in (user_calls.call_user("a", hang), user_calls.call_user("b", swallow)):
        try:
            async with asyncio.timeout(0.05):
                await work
        except TimeoutError:
            print("late", flush=True)

asyncio.run(main())
print("ended")
"""


def test_what_is_left_behind_does_not_keep_the_process() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _HANGS], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stdout.split() == ["late", "late", "ended"], ran.stderr
    assert ran.returncode == 0
