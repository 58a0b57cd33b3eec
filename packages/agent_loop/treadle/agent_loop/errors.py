"""The error tree: one branch per boundary that a trajectory crosses.

Invariant: a failed attempt is data (`RolloutError`, isolated by the runner, never in the
training text); a wrong set-up is `SetupError` and stops the run at its start; anything else is
a bug and keeps its own type until it meets a `boundary`. The cancellation of a task is never
translated; an `asyncio.CancelledError` that nobody asked for (a future of theirs was cancelled) is
a failure like any other, because a task that ends with it would vanish without a word.

`boundary` is the only place that turns foreign exceptions into ours:

    with boundary(ToolError, f"tool {name!r}"):
        result = await session.call(arguments)
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class AgentLoopError(Exception):
    """Anything that this package raises on purpose."""


class SetupError(AgentLoopError):
    """The run cannot start: the pieces do not fit. Fix the set-up; a retry cannot help."""


class UnknownLoopError(SetupError):
    """A task names an agent loop that the registry does not hold."""


class RolloutError(AgentLoopError):
    """One attempt failed.

    Attributes:
        retryable: Whether the same attempt, run again, may succeed.
    """

    retryable: bool = False


class GenerationError(RolloutError):
    """The generator could not complete a prompt."""


class OverloadedError(GenerationError):
    """Every replica that was asked had its queue full, until the retries were used up."""

    retryable = True


class ReplicaUnavailableError(GenerationError):
    """No replica could be reached, or all were paused or leaving; the text names them."""

    retryable = True


class EngineFailedError(GenerationError):
    """The engine behind a replica failed."""

    retryable = True


class GenerationTimeoutError(GenerationError):
    """The request's deadline passed before the completion ended."""

    retryable = True


class PromptTooLongError(GenerationError):
    """The prompt leaves no room in the model's context."""


class WeightVersionBehindError(GenerationError):
    """The replicas hold older weights than `RequestContext.min_weight_version`."""


class RequestRejectedError(GenerationError):
    """The server refused the request as malformed or not allowed: a bug or a wrong token."""


class ImageRejectedError(GenerationError):
    """The servers cannot take the prompt's images: unreadable, too large, or no vision model."""


class ContractError(GenerationError):
    """The server broke the contract: counts that do not add up, tokens after the end."""


class RenderError(RolloutError):
    """The chat template failed, or cannot extend a conversation exactly."""


class ToolError(RolloutError):
    """A tool failed for a reason that is not the model's (`ToolFailure` is the model's)."""

    retryable = True


class InteractionError(RolloutError):
    """An interaction failed, or took too long."""

    retryable = True


class RewardError(RolloutError):
    """The reward function raised."""


class LoopError(RolloutError):
    """The agent loop's own code raised: a bug in it."""


class TrajectoryTimeoutError(RolloutError):
    """The trajectory's deadline passed; everything below it was cancelled.

    Not retryable: its group has waited as long as it may.
    """


@contextmanager
def boundary(error: type[RolloutError], what: str) -> Iterator[None]:
    """Turns any foreign exception raised inside into `error`, with the cause chained.

    Args:
        error: The branch of the tree that this boundary belongs to.
        what: Names the thing that may fail; begins the text of the error.

    Raises:
        RolloutError: One raised inside passes unchanged; others become `error`.
        SetupError: Passes unchanged.
    """
    try:
        yield
    except AgentLoopError:
        raise
    except asyncio.CancelledError as cause:
        if not _is_stray():
            raise
        raise error(f"{what}: CancelledError, though nobody cancelled it") from cause
    except Exception as cause:
        raise error(f"{what}: {type(cause).__name__}: {cause}") from cause


def _is_stray() -> bool:
    """Whether a task runs here and nobody asked it to end."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop
        return False
    return task is not None and not task.cancelling()
