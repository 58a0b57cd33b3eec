"""Closes the tool sessions and the interaction session of a trajectory when it ends.

Invariant: each session is closed once, concurrently with the others, shielded from a cancellation
of the trajectory, and within the time limit. A session that fails to close, or that swallows its
cancellation, is passed to `report_leak`. It does not affect the trajectory, which is complete.

The caller waits for all of them, at most twice the limit.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from treadle.agent_loop.aio import concurrently, run_shielded
from treadle.agent_loop.errors import RolloutError, boundary
from treadle.agent_loop.turning_limit import TurningLimit
from treadle.agent_loop.user_calls import end_if_cancelled


class Closable(Protocol):
    """A session that can be closed."""

    async def aclose(self) -> None:
        """Frees the session's resources."""
        ...


async def close_all(
    sessions: Mapping[str, Closable],
    *,
    error: type[RolloutError],
    timeout_s: float,
    report_leak: Callable[[str], None],
) -> None:
    """Closes sessions.

    Args:
        sessions: By the name that `report_leak` is to show.
        error: The type of error that a failure to close becomes.
        report_leak: Called with a message for each session that could not be closed.
    """

    async def close(what: str, session: Closable) -> None:
        try:
            with boundary(error, f"{what} could not be closed"):
                async with TurningLimit(timeout_s) as limit:
                    await end_if_cancelled(what, limit.own(session.aclose()))
        except error as failure:
            report_leak(str(failure))
        except asyncio.CancelledError:  # by the shield's limit; the session swallowed its own
            report_leak(f"{what} could not be closed: it did not end when it was cancelled")
            raise

    work = concurrently([close(what, session) for what, session in sessions.items()])
    with suppress(TimeoutError):  # `close` has reported which
        await run_shielded(work, timeout_s=2 * timeout_s)
