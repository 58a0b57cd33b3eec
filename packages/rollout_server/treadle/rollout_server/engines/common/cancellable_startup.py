"""Cancellable start of an engine: blocking work on a thread, which starts processes.

Invariant: a cancelled start leaves no process behind, whenever the thread starts it. Who waits:
the caller, for the thread, even after cancellation; the thread ends once its processes are gone.
"""

import asyncio
import multiprocessing
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")
_POLL_S = 0.2


async def cancellable_startup(
    build: Callable[[], T],
    *,
    discard: Callable[[T], Awaitable[None]],
    executor: Executor | None = None,
) -> T:
    """Returns the result of `build`; on cancellation kills the processes that it starts.

    Args:
        build: Called on a thread. Nothing else may start processes meanwhile.
        discard: Closes the result if `build` returned at the moment of cancellation.
        executor: Executor of the thread; None means the event loop's default.

    Raises:
        Exception: Whatever `build` raises.
    """
    others = set(multiprocessing.active_children())
    building = asyncio.get_running_loop().run_in_executor(executor, build)
    try:
        return await asyncio.shield(building)
    except asyncio.CancelledError:
        while not building.done():  # It may start more processes meanwhile.
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            await asyncio.wait({building}, timeout=_POLL_S)
        if building.exception() is None:
            await discard(building.result())
        raise
