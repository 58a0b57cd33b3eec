"""What the driver needs of a rank's process, whoever started it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

__all__ = ["RankProcess", "RankProgram", "StartRank", "wait_until_ended", "with_log"]


class RankProcess(Protocol):
    """A started program. Methods do not block the event loop."""

    async def ready(self, deadline_s: float) -> str:
        """Waits until the program serves; returns its `host:port`.

        Raises:
            RuntimeError: It ended first, or the deadline passed.
        """
        ...

    async def wait(self) -> int:
        """Waits for its end; returns the exit status, or -n if signal n ended it."""
        ...

    def describe_end(self, status: int) -> str:
        """Returns how it ended, and on which node, for a message."""
        ...

    async def log_tail(self, lines: int = 20) -> str:
        """Returns the last lines that it printed."""
        ...

    async def stop(self, grace_s: float = 10.0) -> None:
        """Ends it with SIGTERM, and SIGKILL after `grace_s`; returns when it is gone.

        One that even SIGKILL does not end is left behind with a warning.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """How the process of a rank is started: `python -m treadle.policy.rank ARGUMENTS`.

    Attributes:
        number: Number of the rank, from 0.
        command: Takes the place of `python -m treadle.policy.rank`, in another environment; empty:
            nothing does.
        args: Arguments; `{host}` stands for the address at which the machine is reached.
    """

    number: int
    command: tuple[str, ...]
    args: tuple[str, ...]
    env: Mapping[str, str]


StartRank = Callable[[RankProgram], Awaitable[RankProcess]]
"""Starts the process of a rank on a machine of its choice."""


async def wait_until_ended(process: RankProcess, within_s: float) -> int | None:
    """Returns the exit status of a process, or None if it still runs after `within_s` seconds."""
    try:
        async with asyncio.timeout(within_s):
            return await process.wait()
    except TimeoutError:
        return None


async def with_log(process: RankProcess, text: str, *, where: str = "", lines: int = 10) -> str:
    """Returns what happened to a process, with the last lines of its log."""
    return f"{text}; its log{where} ends with:\n{await process.log_tail(lines)}"
