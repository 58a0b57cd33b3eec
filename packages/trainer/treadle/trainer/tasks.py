"""Running things together: all succeed, or the first failure cancels the rest and is raised."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

__all__ = ["first_cause", "together"]

T = TypeVar("T")


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in order; on failure none of them is left running.

    Raises:
        Exception: the first failure, as it was raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        first = first_cause(failures)
        raise first from first.__cause__  # `from None` would cut off what caused it
    return [task.result() for task in tasks]


def first_cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception of a task group; the texts of the others are added to it as notes."""
    first = failures.exceptions[0]
    if isinstance(first, BaseExceptionGroup):
        first = first_cause(first)
    for other in failures.exceptions[1:]:
        first.add_note(f"at the same time: {other!r}")
    return first
