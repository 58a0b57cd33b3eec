"""The time of a policy rank: each second of the process is put to one cause.

Invariant: between two reports the seconds of all causes add up to the time that passed. The time
always counts for the innermost cause, and for `waiting` outside of commands.

| cause | while the rank |
|---|---|
| waiting | has no command; the driver knows what for |
| receive | reads a command, the batch with it |
| train | runs forward and backward passes, and checks what the update left |
| optimizer | runs optimizer steps |
| logprobs | computes log-probabilities and values before an update |
| weights | exports and sends weights |
| save | writes a checkpoint or a model |
| memory | moves memory off the device and back (`policy.offload`) |
| start | loads the model, or a checkpoint |

Waits for other ranks are in what the rank waits within: an all-reduce of gradients is `train`.
Kernels run behind the host, so on a GPU a cause ends where the host next waits for the device:
`optimizer` does, for the norm of the gradient.

One thread, that of the commands, changes the cause. A process is one rank, so its time is kept
here, and all code that works for a rank names its cause with `spent_on`.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from treadle.policy.config.choices import CAUSES, RankCause

__all__ = ["RANK_TIME", "RankTime", "spent_on"]


class RankTime:
    """See the module docstring.

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
        """Puts the time inside to `cause`, except for what a cause within it takes."""
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
"""Puts the time inside to a cause, of the rank that this process is."""
