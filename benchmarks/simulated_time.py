"""Simulated time: an event loop whose clock jumps to the next timer when no task can continue.

Its tasks wait for timers and for each other only. Nothing is read from a socket or a file
descriptor: a task that waits for one would wait forever. A run in which no timer is left is an
error.

    run(main())
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["run"]

T = TypeVar("T")


class _Jumps(selectors.SelectSelector):
    """Passes the time that it is to wait."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Returns that no descriptor is ready.

        Raises:
            RuntimeError: No timer is set, and no task can continue.
        """
        if timeout is None:
            raise RuntimeError("nothing is left to happen, and the simulation has not ended")
        self.now_s += max(0.0, timeout)
        return []


class _SimulatedLoop(asyncio.SelectorEventLoop):
    """Begins at 0 s. An error that no task would see ends the run."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)
        self.error: BaseException | None = None
        self.set_exception_handler(self._fail)

    def time(self) -> float:
        """Returns the simulated seconds."""
        return self._jumps.now_s

    def _fail(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if self.error is None:
            self.error = context.get("exception") or RuntimeError(context["message"])
            self.stop()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in simulated time, as `asyncio.run` does in real time.

    Raises:
        RuntimeError: Nothing is left to happen before it has ended.
        BaseException: A timer's callback, or a task that nobody waits for, raised it.
    """
    loop = _SimulatedLoop()
    task = loop.create_task(main)
    try:
        try:
            return loop.run_until_complete(task)
        except RuntimeError:
            if loop.error is not None:
                raise loop.error from None
            raise
    finally:
        loop.run_until_complete(_cancel_others())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
