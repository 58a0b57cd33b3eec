"""Closing: how the sessions of a trajectory's tools and of its interaction end with it.

Invariant: each session is closed once, all of them at the same time, shielded from a cancellation
of the trajectory, and each within the limit. One that fails to close, or swallows its own
cancellation, is named to `leaks` and spoils nothing: the trajectory is complete and good.

The caller waits for all of them, at most twice the limit.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from treadle.agent_loop.aio import concurrently, run_shielded
from treadle.agent_loop.errors import RolloutError, boundary


class Closable(Protocol):
    """What is closed."""

    async def aclose(self) -> None:
        """Frees what was opened."""
        ...


async def close_all(
    sessions: Mapping[str, Closable],
    *,
    error: type[RolloutError],
    timeout_s: float,
    leaks: Callable[[str], None],
) -> None:
    """Closes sessions.

    Args:
        sessions: By what each is called in the text for `leaks`.
        error: The branch of the tree that their failures belong to.
        timeout_s: For each to close.
        leaks: Told what could not be closed, and why.
    """

    async def close(what: str, session: Closable) -> None:
        try:
            with boundary(error, f"{what} could not be closed"):
                async with asyncio.timeout(timeout_s):
                    await session.aclose()
        except error as failure:
            leaks(str(failure))
        except asyncio.CancelledError:  # by the shield's limit; its own was swallowed
            leaks(f"{what} could not be closed: it did not end when it was cancelled")
            raise

    work = concurrently([close(what, session) for what, session in sessions.items()])
    with suppress(TimeoutError):  # `close` has said which
        await run_shielded(work, timeout_s=2 * timeout_s)
