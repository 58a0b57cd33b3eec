"""The time of a policy rank by cause: each second of the process counts for exactly one.

Invariant: between two reports, the seconds of all causes add up to the elapsed time. Causes nest,
and time counts for the innermost one; outside of commands it counts for `waiting`.

| cause | while the rank |
|---|---|
| waiting | has no command from the driver |
| receive | reads a command and its batch |
| train | runs forward and backward passes, and checks that the result is finite |
| optimizer | runs optimizer steps |
| logprobs | computes log-probabilities and values before an update |
| weights | exports and sends weights |
| save | writes a checkpoint or a model |
| memory | moves memory off the device and back (`policy.offload`) |
| start | loads the model, or a checkpoint |

Waiting for other ranks counts for the cause within which the rank waits: an all-reduce of gradients
is `train`. GPU kernels run asynchronously, so their time counts for the cause in which the host
next waits for the device: `optimizer` waits for the norm of the gradient.

Only the thread that runs the commands changes the cause. A process is one rank, so this module
holds its time, and code that works for a rank names its cause with `spent_on`.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from treadle.policy.config.choices import CAUSES, RankCause

__all__ = ["RANK_TIME", "RankTime", "spent_on"]


class RankTime:
    """The seconds of a process by cause; see the module docstring.

    Args:
        now: Returns the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._cause: RankCause = "waiting"
        self._since = now()
        self._seconds: dict[str, float] = dict.fromkeys(CAUSES, 0.0)

    @contextlib.contextmanager
    def spent_on(self, cause: RankCause) -> Iterator[None]:
        """Counts the time inside for `cause`, except for the time of causes nested in it."""
        outer = self._cause
        self._change(cause)
        try:
            yield
        finally:
            self._change(outer)

    def take(self) -> Mapping[str, float]:
        """Returns the seconds of every cause since the last call."""
        self._change(self._cause)
        taken, self._seconds = self._seconds, dict.fromkeys(CAUSES, 0.0)
        return taken

    def _change(self, cause: RankCause) -> None:
        now = self._now()
        self._seconds[self._cause] += now - self._since
        self._cause, self._since = cause, now


RANK_TIME: Final = RankTime()
"""The time of this process."""

spent_on = RANK_TIME.spent_on
"""Counts the time inside for a cause of this process's rank; see `RankTime.spent_on`."""
