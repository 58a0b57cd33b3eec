"""Calls a user's code so that it can neither hold the event loop nor outlive its cancellation.

Invariant: a caller that waits for a user's code, and is cancelled, waits `GRACE_S` longer at most.
A plain function runs on a thread beside the event loop. Python can end neither a thread nor a task
that swallows its cancellation, so these are left behind: a warning names them, and nothing waits
for them, not even the end of the process. A thread whose function has ended serves the next call.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

GRACE_S = 5.0
"""Time for clean-up that a cancelled task has before it is left behind, in seconds."""

# As many as Python's own executor has at most. A thread that is left behind gives its place back.
_MAX_THREADS = 32
# What each waiting thread gets its calls from. A forked child has none of the threads.
_idle: list[SimpleQueue[Callable[[], Callable[[], object]]]] = []
os.register_at_fork(after_in_child=_idle.clear)
_places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
_log = logging.getLogger(__name__)


async def call_user(what: str, function: Callable[[], object]) -> object:
    """Calls a plain or async function and returns its result; leaves behind what does not end.

    Args:
        what: Names it in the warning if it is left behind, as "the reward".
        function: Plain functions run on a thread, several at a time.

    Raises:
        BaseException: Whatever the function raised.
    """
    if _is_async(function):
        return await end_if_cancelled(what, result_of(what, function))
    result = await in_thread(what, function)
    return await end_if_cancelled(what, _end(result)) if inspect.isawaitable(result) else result


async def result_of(what: str, function: Callable[[], object]) -> object:
    """Calls it likewise, without the grace: for callers that run inside `end_if_cancelled`.

    Raises:
        BaseException: Whatever the function raised.
    """
    result = function() if _is_async(function) else await in_thread(what, function)
    return await result if inspect.isawaitable(result) else result


async def _end(result: Awaitable[object]) -> object:
    return await result


async def in_thread(what: str, function: Callable[[], T]) -> T:
    """Calls a plain function on a thread that nothing else uses, and returns its result.

    Raises:
        BaseException: Whatever the function raised.
        asyncio.CancelledError: The caller was cancelled; the thread is left behind.
    """
    loop = asyncio.get_running_loop()
    context = contextvars.copy_context()
    # With the error as a value: a Future takes no StopIteration.
    done: asyncio.Future[tuple[T] | BaseException] = loop.create_future()

    ended: list[bool] = []  # the future is cancelled with its caller

    def tell(outcome: tuple[T] | BaseException) -> None:
        ended.append(True)
        if not done.done():
            done.set_result(outcome)

    def run() -> Callable[[], object]:
        threading.current_thread().name = what
        outcome: tuple[T] | BaseException
        try:
            outcome = (context.run(function),)
        except BaseException as error:
            outcome = error
        return partial(loop.call_soon_threadsafe, tell, outcome)

    places = _places.get(loop) or _places.setdefault(loop, asyncio.Semaphore(_MAX_THREADS))
    async with places:
        _start(run)
        try:
            outcome = await done
        except asyncio.CancelledError:
            loop.call_later(GRACE_S, _warn_unless, ended, what)  # most end at once
            raise
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome[0]


def _warn_unless(ended: Sequence[bool], what: str) -> None:
    if not ended:
        _log.warning("%s did not end in time; its thread is left behind", what)


def _start(run: Callable[[], Callable[[], object]]) -> None:
    """Calls `run` on a thread, and then what it returns, when the thread can be used again."""
    try:
        calls = _idle.pop()
    except IndexError:
        calls = SimpleQueue()
        threading.Thread(target=_serve, args=(calls,), daemon=True).start()
    calls.put(run)


def _serve(calls: SimpleQueue[Callable[[], Callable[[], object]]]) -> None:
    while _serve_one(calls):
        pass


def _serve_one(calls: SimpleQueue[Callable[[], Callable[[], object]]]) -> bool:
    """Serves a call, and returns whether the thread can be used again.

    A separate function, so that a thread that waits for a call keeps nothing of the last one.
    """
    report = calls.get()()
    kept = len(_idle) < _MAX_THREADS
    if kept:
        _idle.append(calls)
    with suppress(RuntimeError):  # the loop has closed, and nobody waits
        report()
    return kept


async def end_if_cancelled(
    what: str, work: Coroutine[Any, Any, T], *, on_left_behind: Callable[[], None] | None = None
) -> T:
    """Awaits `work`; if the caller is cancelled, `work` has `GRACE_S` to end.

    Args:
        what: Names it in the warning if it is left behind.
        work: Runs as a separate task.

    Raises:
        BaseException: Whatever `work` raised.
        asyncio.CancelledError: The caller was cancelled; `work` has ended, or is left behind.
    """
    task = asyncio.create_task(_outcome(work), name=what)
    try:
        # `work` can end it too, by its own CancelledError; it has ended then.
        await asyncio.shield(task)
    except asyncio.CancelledError as cancelled:
        task.cancel()
        try:
            await asyncio.wait([task], timeout=GRACE_S)
        finally:
            if not task.done():
                _leave_behind(task)
                cancelled.add_note(f"{what} did not end when it was cancelled")
                if on_left_behind is not None:
                    on_left_behind()
        if task.done() and not task.cancelled() and isinstance(error := task.result(), Exception):
            cancelled.add_note(f"{what} raised when it was cancelled: {error!r}")
        raise
    outcome = task.result()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome[0]


async def _outcome(work: Coroutine[Any, Any, T]) -> tuple[T] | BaseException:
    """Returns the result of `work`, or what it raised: SystemExit in a task would end the loop."""
    try:
        return (await work,)
    except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        return error


def _leave_behind(task: asyncio.Task[Any]) -> None:
    # The end of asyncio.run would cancel it once more, and wait for it forever.
    asyncio._unregister_task(task)
    _log.warning(
        "%s did not end within %g s after it was cancelled, and is left behind: code that catches "
        "asyncio.CancelledError must raise it again",
        task.get_name(),
        GRACE_S,
    )


def _is_async(function: Callable[[], object]) -> bool:
    called = function.func if isinstance(function, partial) else function
    call = type(called).__call__
    return inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(call)
