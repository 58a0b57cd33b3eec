"""Signals: they cancel the work of a command, which then cleans up."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["Interrupted", "until_signal"]

T = TypeVar("T")


class Interrupted(Exception):
    """A signal ended the work.

    Attributes:
        number: Of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


async def until_signal(work: Coroutine[Any, Any, T]) -> T:
    """Awaits the work; SIGINT and SIGTERM cancel it, so that it can clean up.

    Raises:
        Interrupted: A signal came.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    received: list[int] = []

    def end(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise Interrupted(received[0]) from None
        raise
