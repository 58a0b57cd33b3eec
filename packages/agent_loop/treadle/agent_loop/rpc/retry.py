"""Retries: how long to wait after a failure, and how many failures are too many.

Invariants:

1. Waits grow geometrically up to a bound and are never shorter than the server requested.
2. `Backoff.until` only moves forward while failures last, and is reset by the first success.
   A failure during a back-off belongs to the same incident and does not extend it.

Randomness and time are arguments, so tests control both. One event loop owns a `Backoff`.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Bounds of retries and of the waits between them. Deadlines apply in addition.

    Attributes:
        max_failures: Number of failures of one replica after which a request no longer uses it.
            Overload and pauses do not count: the request waits for them until its deadline.
        max_s: Longest wait that the client chooses; a server may request a longer one.
        factor: Growth from one wait to the next.
        jitter: Largest random addition to a wait, as a fraction of it, in [0, 1].
    """

    max_failures: int = 3
    initial_s: float = 0.1
    max_s: float = 5.0
    factor: float = 2.0
    jitter: float = 0.25

    def __post_init__(self) -> None:
        if self.max_failures < 1:
            raise ValueError(f"max_failures is {self.max_failures}; it must be at least 1")
        if not 0 < self.initial_s <= self.max_s:
            raise ValueError(
                f"initial_s is {self.initial_s} and max_s {self.max_s}; "
                "they must satisfy 0 < initial_s <= max_s"
            )

    def wait_s(
        self,
        attempt: int,
        *,
        retry_after_s: float | None,
        uniform: Callable[[], float] = random.random,
    ) -> float:
        """Returns the seconds to wait after the `attempt`-th consecutive failure, from 1."""
        own = min(self.max_s, self.initial_s * self.factor ** min(attempt - 1, 64))
        return max(own, retry_after_s or 0.0) * (1 + self.jitter * uniform())


@dataclass(slots=True, kw_only=True)
class Backoff:
    """The wait before an address is used again.

    Attributes:
        until: No request is sent before this time; clock seconds.
    """

    until: float = 0.0
    _failures_in_a_row: int = 0

    def fail(self, now: float, retry: RetryPolicy, retry_after_s: float | None) -> None:
        """Records a failure and starts the next wait."""
        if now < self.until:
            return
        self._failures_in_a_row += 1
        self.until = now + retry.wait_s(self._failures_in_a_row, retry_after_s=retry_after_s)

    def recover(self) -> None:
        """Records a success."""
        self._failures_in_a_row = 0
        self.until = 0.0
