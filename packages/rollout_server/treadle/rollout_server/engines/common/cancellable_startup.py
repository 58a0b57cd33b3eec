"""The building of an engine: blocking work on a thread, which starts processes.

Invariant: who gives up waiting for an engine leaves none of its processes behind, whenever the
building starts them. Who waits: the caller, for the thread; given up, still until it ends, which
it does when its processes are gone.
"""

import asyncio
import multiprocessing
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")
_LOOK_S = 0.2


async def built(
    build: Callable[[], T],
    *,
    discard: Callable[[T], Awaitable[None]],
    executor: Executor | None = None,
) -> T:
    """What `build` returns; cancelled, ends the processes that it starts.

    Args:
        build: Called on a thread. Nothing else starts processes meanwhile.
        discard: Ends what was built in the instant in which nobody wanted it any more.
        executor: Of the thread; None: the event loop's own.

    Raises:
        Exception: What `build` raises.
    """
    others = set(multiprocessing.active_children())
    building = asyncio.get_running_loop().run_in_executor(executor, build)
    try:
        return await asyncio.shield(building)
    except asyncio.CancelledError:
        while not building.done():  # Whatever it starts meanwhile has no use either.
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            await asyncio.wait({building}, timeout=_LOOK_S)
        if building.exception() is None:
            await discard(building.result())
        raise
