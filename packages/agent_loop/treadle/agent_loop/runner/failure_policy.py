"""Failure policies: what the runner does about a failed attempt.

Invariant: a policy is pure. The runner calls it once per failed attempt and follows its verdict.
It gets only `RolloutError`s; a `SetupError` or an error of the sink always ends the run.
"""

import enum
from dataclasses import dataclass, field
from typing import Protocol

from treadle.agent_loop.errors import RolloutError


class Verdict(enum.Enum):
    """The runner's reaction to a failed attempt."""

    RAISE = "raise"
    """Cancel everything and raise the error."""
    RETRY = "retry"
    """Attempt the task again from its beginning."""
    DELIVER = "deliver"
    """Pass the sink a trajectory with stop ERROR, and continue."""


class FailurePolicy(Protocol):
    """Decides about failed attempts."""

    def judge(self, error: RolloutError, *, attempt: int) -> Verdict:
        """Returns what to do about an attempt that failed; `attempt` counts from 1."""
        ...


@dataclass(frozen=True, slots=True)
class FailFast:
    """Ends the run at the first failure. For debugging and tests."""

    def judge(self, error: RolloutError, *, attempt: int) -> Verdict:
        """Returns RAISE."""
        return Verdict.RAISE


@dataclass(frozen=True, slots=True)
class Drop:
    """Delivers a failed trajectory; its group continues without it."""

    def judge(self, error: RolloutError, *, attempt: int) -> Verdict:
        """Returns DELIVER."""
        return Verdict.DELIVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Attempts a task again, from its messages, if the error is retryable.

    Attributes:
        max_attempts: Maximum number of attempts per task, the first included; at least 1.
        then: Decides about errors that are not retryable, and about the last attempt.
    """

    max_attempts: int = 2
    then: FailurePolicy = field(default_factory=Drop)

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts is {self.max_attempts}; it must be at least 1")

    def judge(self, error: RolloutError, *, attempt: int) -> Verdict:
        """Returns RETRY while the error is retryable and attempts are left."""
        if error.retryable and attempt < self.max_attempts:
            return Verdict.RETRY
        return self.then.judge(error, attempt=attempt)
