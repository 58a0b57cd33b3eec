"""What those who keep processes alive share: the budget of restarts, and the text of an end."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from treadle.policy.client.process import RankProcess, with_log

__all__ = ["Restarts", "watch_end"]


@dataclass(slots=True)
class Restarts:
    """The restarts of one kind of process.

    Attributes:
        limit: Maximum number of restarts, over all processes of the kind.
        setting: Key of the configuration that sets the limit.
        used: Number of restarts that were begun, also of those that failed.
        num_lost: Processes that were lost, since `take_metrics`.
        num_restarted: Processes that serve again, since `take_metrics`.
    """

    limit: int
    setting: str
    used: int = 0
    num_lost: int = 0
    num_restarted: int = 0

    def take(self) -> bool:
        """Counts a restart; returns whether one was left."""
        left = self.used < self.limit
        self.used += left
        return left

    def take_metrics(self, kind: str) -> dict[str, float]:
        """Returns the losses and restarts since the last call."""
        taken = {
            f"{kind}/lost": float(self.num_lost),
            f"{kind}/restarted": float(self.num_restarted),
        }
        self.num_lost = self.num_restarted = 0
        return taken

    def __str__(self) -> str:
        """Returns how many were used, for the message of the last end."""
        return f"after {self.used} restarts ({self.setting}={self.limit})"


def watch_end(
    name: str, process: RankProcess, on_end: "Callable[[asyncio.Task[str]], None]"
) -> "asyncio.Task[str]":
    """Returns a task that is done when a process has ended, with how.

    Args:
        on_end: Called on the event loop with the task, when it is done or cancelled.
    """

    async def end() -> str:
        return await with_log(process, process.describe_end(await process.wait()))

    ended = asyncio.create_task(end(), name=f"end of {name}")
    ended.add_done_callback(on_end)
    return ended
