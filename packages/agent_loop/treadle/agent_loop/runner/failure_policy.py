"""Strategies: what a failed attempt means for the run.

Invariant: pure; the runner asks once per failed attempt and does what it is told. A strategy sees
only `RolloutError`s; a `SetupError` or an error of the sink always ends the run.
"""

import enum
from dataclasses import dataclass, field
from typing import Protocol

from treadle.agent_loop.errors import RolloutError


class Verdict(enum.Enum):
    """What the runner does about a failed attempt."""

    RAISE = "raise"
    """Cancel everything and raise the error."""
    RETRY = "retry"
    """Attempt the task again from its beginning."""
    DELIVER = "deliver"
    """Give the sink a trajectory with stop ERROR, and go on."""


class Strategy(Protocol):
    """Judges failed attempts."""

    def judge(self, error: RolloutError, *, attempt: int) -> Verdict:
        """Says what becomes of an attempt that failed; `attempt` counts from 1."""
        ...


@dataclass(frozen=True, slots=True)
class FailFast:
    """The first failure ends the run. For debugging and tests."""

    def judge(self, error: RolloutError, *, attempt: int) -> Verdict:
        """Always RAISE."""
        return Verdict.RAISE


@dataclass(frozen=True, slots=True)
class Drop:
    """A failure is delivered, and its group goes on without it."""

    def judge(self, error: RolloutError, *, attempt: int) -> Verdict:
        """Always DELIVER."""
        return Verdict.DELIVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A failure that may not happen again is attempted again, from the task's messages.

    Attributes:
        max_attempts: Attempts of one task, the first included; at least 1.
        then: Judges errors that are not retryable, and the last attempt's.
    """

    max_attempts: int = 2
    then: Strategy = field(default_factory=Drop)

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts is {self.max_attempts}; it must be at least 1")

    def judge(self, error: RolloutError, *, attempt: int) -> Verdict:
        """RETRY while the error is retryable and attempts are left."""
        if error.retryable and attempt < self.max_attempts:
            return Verdict.RETRY
        return self.then.judge(error, attempt=attempt)
