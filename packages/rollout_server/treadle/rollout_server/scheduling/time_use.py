"""The time use of a server: each second since it started is put to one cause.

Invariant: the seconds of all causes add up to the time since the server started, and none of them
ever falls. The event loop notes changes; any thread may read.

| cause | while |
|---|---|
| starting | the engine loads for the first time |
| weights | new weights are switched to, or the server is paused with its memory |
| memory | the server is paused and some of its device memory is released |
| prefill, decode | it serves and has sequences: the engine reads prompts, or samples |
| waiting | it serves and has no sequence: it waits for prompts |
| failed | the engine has failed |

A sequence is in prefill from its admission to its first token. Engines read prompts and sample in
the same step, so while some sequences are in prefill and others sample, the time is divided in
proportion to their numbers. An engine that is given more sequences than it has slots lets the
others wait; they count in neither. vLLM and SGLang report a sequence with its first token, so a
sequence that waits within them while slots are free counts as prefill.
"""

import enum
from collections.abc import Callable, Mapping
from typing import Self

from treadle.rollout_server.scheduling.lifecycle import ServerState

__all__ = ["Cause", "SequenceTime", "TimeUse"]


class Cause(enum.Enum):
    """A cause of a server's time; the value is the name of its field and label."""

    STARTING = "starting"
    PREFILL = "prefill"
    DECODE = "decode"
    WAITING = "waiting"
    WEIGHTS = "weights"
    MEMORY = "memory"
    FAILED = "failed"


_CAUSES = tuple(Cause)
_BY_STATE = {
    ServerState.LOADING: Cause.WEIGHTS,  # once it has served: the weights are a mixture
    ServerState.UPDATING: Cause.WEIGHTS,
    ServerState.FAILED: Cause.FAILED,
}
_Seconds = tuple[float, ...]
"""One number per cause, in the order of `Cause`."""
_Shares = tuple[tuple[int, float], ...]
"""The causes that time is divided by, as indices of `Cause`, with their shares of it."""
_ONLY: Mapping[Cause, _Shares] = {cause: ((at, 1.0),) for at, cause in enumerate(_CAUSES)}
_PREFILL, _DECODE = _CAUSES.index(Cause.PREFILL), _CAUSES.index(Cause.DECODE)


class SequenceTime:
    """One sequence of the engine; a context manager from its admission to its end."""

    __slots__ = ("_samples", "_use")

    def __init__(self, use: "TimeUse") -> None:
        self._use = use
        self._samples = False

    def sampled(self) -> None:
        """Notes that a token has come; only the first one changes anything."""
        if not self._samples:
            self._samples = True
            self._use._move(reading=-1, sampling=1)

    def __enter__(self) -> Self:
        self._use._move(reading=1)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._samples:
            self._use._move(sampling=-1)
        else:
            self._use._move(reading=-1)


class TimeUse:
    """See the module docstring.

    Args:
        now: Returns clock seconds; called from any thread.
        slots: Maximum number of sequences that the engine runs at once.
    """

    def __init__(self, now: Callable[[], float], *, slots: int) -> None:
        self._now = now
        self._slots = slots
        self._state = ServerState.LOADING
        self._has_served = False
        self._released = False
        self._reading = 0
        self._sampling = 0
        # In one tuple, which is replaced as a whole: other threads read it. Time of the latest
        # change, seconds per cause until then, and how the time since then is divided.
        self._settled: tuple[float, _Seconds, _Shares] = (
            now(),
            (0.0,) * len(_CAUSES),
            _ONLY[Cause.STARTING],
        )

    def seconds(self) -> Mapping[Cause, float]:
        """Returns the seconds of every cause until now."""
        return dict(zip(_CAUSES, self._until(self._now()), strict=True))

    def sequence(self) -> SequenceTime:
        """Returns the context of a sequence that the engine is given."""
        return SequenceTime(self)

    def entered(self, state: ServerState) -> None:
        """Notes that the server is in another state."""
        self._state = state
        self._has_served |= state is ServerState.SERVING
        self._settle()

    def released(self, released: bool) -> None:
        """Notes whether some device memory is released."""
        self._released = released
        self._settle()

    def _move(self, *, reading: int = 0, sampling: int = 0) -> None:
        self._reading += reading
        self._sampling += sampling
        self._settle()

    def _settle(self) -> None:
        now = self._now()
        self._settled = (now, self._until(now), self._shares())

    def _until(self, now: float) -> _Seconds:
        since, settled, shares = self._settled
        passed, seconds = max(0.0, now - since), list(settled)
        for at, share in shares:
            seconds[at] += passed * share
        return tuple(seconds)

    def _shares(self) -> _Shares:
        """Returns how the time is divided from now on."""
        if not self._has_served and self._state is ServerState.LOADING:
            return _ONLY[Cause.STARTING]
        if self._state is ServerState.PAUSED:
            return _ONLY[Cause.MEMORY if self._released else Cause.WEIGHTS]
        if (cause := _BY_STATE.get(self._state)) is not None:
            return _ONLY[cause]
        reading = min(self._reading, max(0, self._slots - self._sampling))
        if not reading:
            return _ONLY[Cause.DECODE if self._sampling else Cause.WAITING]
        share = reading / (reading + self._sampling)
        return (_PREFILL, share), (_DECODE, 1 - share)
