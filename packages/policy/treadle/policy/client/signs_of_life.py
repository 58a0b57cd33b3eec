"""Signs of life: how the driver detects a rank whose process stands still.

A rank sends one at fixed intervals from a separate thread while it executes a request. So a rank
that computes for an hour, or waits for another rank, is heard; a process that was stopped, or whose
machine stands still, is not. Ranks that wait for each other forever are heard too; the time limit
of the operation (`policy.collective_timeout_s`) ends them.

A long import of a compiled library holds Python's lock and sends no sign meanwhile.
"""

import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Alive", "Silence", "beat_s", "sign_of_life"]

_LOOKS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """A sign of life.

    Attributes:
        place: The code that the process executes, as `module:line, in function`.
    """

    pid: int
    node: str
    place: str


def beat_s(unresponsive_s: float) -> float:
    """Returns the time between two signs of life: a second, or less for a very short limit."""
    return min(1.0, unresponsive_s / (2 * _LOOKS))


def sign_of_life(thread: int) -> Alive:
    """Returns where a thread of this process is, by its identifier."""
    frame = sys._current_frames()[thread]
    module, code = frame.f_globals.get("__name__", "?"), frame.f_code
    return Alive(
        pid=os.getpid(),
        node=platform.node(),
        place=f"{module}:{frame.f_lineno}, in {code.co_name}",
    )


class Silence:
    """The driver's end: for how long each rank at work has given no sign of life.

    It counts the driver's looks instead of subtracting times: while the driver itself stands
    still, signs wait unread, and no rank is to blame.

    Args:
        limit_s: Silence that makes a rank dead.
    """

    def __init__(self, limit_s: float) -> None:
        self.look_s = limit_s / _LOOKS
        """Least time between two looks."""
        self._heard: dict[int, int] = {}
        self._looks: dict[int, int] = {}

    def look(self, heard: Iterable[tuple[int, int]]) -> list[int]:
        """Returns the ranks that have been silent for the limit.

        Args:
            heard: Number of each rank at work, and how many signs it has given so far.
        """
        looks = {}
        for rank, signs in heard:
            silent = self._heard.get(rank) == signs
            looks[rank] = self._looks[rank] + 1 if silent else 0
            self._heard[rank] = signs
        self._looks = looks
        return [rank for rank, count in looks.items() if count >= _LOOKS]

    def silent_s(self, rank: int) -> float:
        """Returns for how long a rank at work has been silent."""
        return self._looks.get(rank, 0) * self.look_s
