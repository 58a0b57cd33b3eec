"""What an interrupt waits for: a step that changes the policy ends before the run does.

An interrupt cancels the run's task. While trajectories are sampled the policy is at rest, so its
last step can be saved; while it is updated, only the end of the step leaves a state to save.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["finished_first"]

T = TypeVar("T")


async def finished_first(work: Coroutine[Any, Any, T], *, say: Callable[[str], None]) -> T:
    """Finishes the work even if the caller is cancelled meanwhile; then raises the cancellation.

    The first cancellation is announced by `say`; a second one ends the work at once.

    Raises:
        asyncio.CancelledError: The caller was cancelled.
        Exception: What the work raises.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            say("interrupted: the step is finished and saved first; interrupt again to end now")
            await task
        raise
