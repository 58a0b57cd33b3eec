"""Signs of life: how the driver tells a rank that computes from one whose process stands still.

A rank sends one every so often while it executes a command, from a separate thread. So a rank
that computes for an hour, or waits for another rank, is heard; a process that was stopped, or whose
machine stands still, is not. Ranks that wait for each other forever are heard too: what ends them
is the time limit of the operation (`policy.collective_timeout_s`).

A long import of a compiled library holds Python's lock, and is silent for as long.

Invariant: nothing is sent between an answer and the next command, so that nothing fills up a
connection that the driver does not read.
"""

import os
import platform
import sys
import threading
from collections.abc import Iterable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from treadle.policy.client.commands import Alive

__all__ = ["SignsOfLife", "Silence", "beat_s", "sign_of_life"]

_LOOKS = 20


def beat_s(unresponsive_s: float) -> float:
    """Returns the time between two signs of life: a second, or less for a very short limit."""
    return min(1.0, unresponsive_s / (2 * _LOOKS))


class SignsOfLife:
    """The rank's end; a context manager around each command.

    Args:
        connection: To the driver, which gets the first sign at once. Answers on it are sent
            outside of the context.
        beat_s: Time between two signs.
    """

    def __init__(self, connection: "Connection[Any, Any]", *, beat_s: float) -> None:
        self._connection = connection
        self._beat_s = beat_s
        self._main = threading.get_ident()
        self._sending = threading.Lock()
        self._at_work = threading.Event()
        connection.send(sign_of_life(self._main))
        threading.Thread(target=self._beat, name="signs of life", daemon=True).start()

    def __enter__(self) -> None:
        self._at_work.set()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._at_work.clear()
        with self._sending:  # a sign on its way comes before the answer
            pass

    def _beat(self) -> None:
        pause = threading.Event()
        while self._at_work.wait():
            with self._sending:
                if self._at_work.is_set():
                    try:
                        self._connection.send(sign_of_life(self._main))
                    except OSError:  # the driver is gone
                        return
            pause.wait(self._beat_s)


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
            heard: Of each rank at work its number, and how many signs it has given so far.
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
