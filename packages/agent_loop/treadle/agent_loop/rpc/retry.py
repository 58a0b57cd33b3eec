"""Retry: how long to leave a replica alone, and how often to come back.

Invariant: waits grow geometrically to a bound and never fall below what the server asked for;
randomness and time come in as arguments, so a test decides both.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Bounds of waiting and coming back. Deadlines bound everything besides.

    Attributes:
        max_failures: Failures of one replica, in one request, after which the request leaves it
            for good. Overload and pauses are no failures: they are waited for until the deadline.
        initial_s: First wait.
        max_s: Longest wait of our own making; a server may ask for more.
        factor: Growth from one wait to the next.
        jitter: Share of a wait that is added at random, in [0, 1].
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
                f"initial_s is {self.initial_s} and max_s {self.max_s}; 0 < initial_s <= max_s"
            )

    def wait_s(
        self,
        attempt: int,
        *,
        retry_after_s: float | None,
        uniform: Callable[[], float] = random.random,
    ) -> float:
        """Seconds to wait after the `attempt`-th failure in a row, counted from 1."""
        own = min(self.max_s, self.initial_s * self.factor ** min(attempt - 1, 64))
        return max(own, retry_after_s or 0.0) * (1 + self.jitter * uniform())
