"""Helpers for asyncio tasks: shielded clean-up, and running several coroutines together.

Invariant: every task ends before the function that created it returns, and a cancellation may be
delayed but is never swallowed.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_shielded(work: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
    """Runs clean-up to its end even if the caller is cancelled meanwhile.

    The caller waits for the work in either case; a cancellation is raised afterwards.

    Args:
        work: The work that must not be interrupted.
        timeout_s: Time after which the work itself is cancelled.

    Raises:
        TimeoutError: The work took longer than `timeout_s`.
    """
    task = asyncio.create_task(_bounded(work, timeout_s))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled() and task.exception() is not None:
            cancelled.add_note(f"while shielded work failed: {task.exception()!r}")
        raise cancelled
    return task.result()


async def concurrently(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs coroutines concurrently and returns their results in the order given.

    A single one runs in the caller's task.

    Raises:
        BaseException: The first failure, not wrapped in a group, after the other coroutines were
            cancelled and awaited.
    """
    coroutines = tuple(works)
    if len(coroutines) < 2:  # the usual case; a group and a task take longer than a tool's call
        return [await work for work in coroutines]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in coroutines]
    except BaseExceptionGroup as failures:
        first = sole_cause(failures)
        raise first from first.__cause__  # `from None` would cut off what caused it
    return [task.result() for task in tasks]


def sole_cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the first exception of a task group, with the others added to it as notes."""
    first = failures.exceptions[0]
    if isinstance(first, BaseExceptionGroup):
        first = sole_cause(first)
    for other in failures.exceptions[1:]:
        first.add_note(f"at the same time: {other!r}")
    return first


async def _bounded(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    async with asyncio.timeout(timeout_s):
        return await work


async def run_until(
    work: Coroutine[Any, Any, T], *ends: Callable[[], Coroutine[Any, Any, object]]
) -> T | None:
    """Runs work to its end, or cancels it as soon as one of `ends` returns.

    Returns:
        The work's result, or None if it was cancelled.

    Raises:
        BaseException: The first failure, of the work or of one of `ends`, as in `concurrently`.
    """
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work)
            tasks = [task, *(group.create_task(end()) for end in ends)]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for each in tasks:
                each.cancel()
    except BaseExceptionGroup as failures:
        first = sole_cause(failures)
        raise first from first.__cause__
    return None if task.cancelled() else task.result()
