"""The error tree: one branch per boundary that a trajectory crosses.

Invariant: a failed attempt is data (`RolloutError`): the runner isolates it, and its text never
enters the training data. A wrong set-up is a `SetupError`, which stops the run at its start. Any
other exception is a bug and keeps its type until it reaches a `boundary`. The cancellation of a
task is never translated. An `asyncio.CancelledError` without a cancellation (from a cancelled
future of foreign code) is treated as a failure, because a task that ends with it would otherwise
disappear silently.

`boundary` is the only place that translates foreign exceptions:

    with boundary(ToolError, f"tool {name!r}"):
        result = await session.call(arguments)
"""

import asyncio
import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from treadle.agent_loop.user_code import user_place
from treadle.tracing.inert import inert


class AgentLoopError(Exception):
    """The base of all errors that this package raises on purpose."""


class SetupError(AgentLoopError):
    """The run cannot start because its set-up is wrong. A retry cannot help."""


class UnknownLoopError(SetupError):
    """A task names an agent loop that is not in the registry."""


class RolloutError(AgentLoopError):
    """One attempt failed.

    Attributes:
        retryable: Whether the attempt may succeed if it is repeated.
    """

    retryable: bool = False


class GenerationError(RolloutError):
    """The generator could not complete a prompt."""


class OverloadedError(GenerationError):
    """The queue of every replica tried was full until the retries were used up."""

    retryable = True


class ReplicaUnavailableError(GenerationError):
    """No replica could be reached, or all were paused or shutting down; the message names them."""

    retryable = True


class EngineFailedError(GenerationError):
    """The engine behind a replica failed."""

    retryable = True


class GenerationTimeoutError(GenerationError):
    """The request's deadline passed before the completion ended."""

    retryable = True


class PromptTooLongError(GenerationError):
    """The prompt leaves no room for a token in the model's context."""


class WeightVersionBehindError(GenerationError):
    """The replicas hold older weights than the request or the generator allows.

    Another attempt may succeed: a replica that was started again is given the present weights.
    """

    retryable = True


class RequestRejectedError(GenerationError):
    """The server refused the request as malformed or not allowed: a client bug or wrong token."""


class ImageRejectedError(GenerationError):
    """The servers cannot process the prompt's images: unreadable, too large, no vision model."""


class ContractError(GenerationError):
    """The server broke the contract, for example with wrong counts or tokens after the end."""


class RenderError(RolloutError):
    """The chat template failed, or cannot extend a conversation exactly."""


class ToolError(RolloutError):
    """A tool failed and the model is not at fault (`ToolFailure` is for the model's faults).

    Attributes:
        tool: Name of the tool, if a toolbox ran it.
    """

    retryable = True
    tool: str | None = None


class InteractionError(RolloutError):
    """An interaction failed, or took too long."""

    retryable = True


class RewardError(RolloutError):
    """The reward function raised."""


class LoopError(RolloutError):
    """The agent loop's own code raised, which is a bug in it."""


class TrajectoryTimeoutError(RolloutError):
    """The trajectory's deadline passed, and all its work was cancelled.

    Not retryable, because the deadline covers all attempts of the task.
    """


@contextmanager
def boundary(error: type[RolloutError], what: str) -> Iterator[None]:
    """Turns any foreign exception raised inside into `error`, with the cause chained.

    SystemExit, as `exit()` and argparse raise it, and errors beside `Exception`, as the panics of
    libraries in Rust, are foreign exceptions too: a user's code may not end the program.

    Args:
        error: The branch of the tree that this boundary belongs to.
        what: Names the thing that may fail; the error's message begins with it, and ends with
            the place in the user's code, if there is one. What it quotes is inert (`inert`).

    Raises:
        RolloutError: One raised inside passes unchanged; a foreign exception becomes `error`.
        SetupError: One raised inside passes unchanged.
        KeyboardInterrupt: The user pressed Ctrl-C.
    """
    try:
        yield
    except AgentLoopError:
        raise
    except asyncio.CancelledError as cause:
        if not _is_stray():
            raise
        raise error(f"{what}: CancelledError, though nobody cancelled it") from cause
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as cause:
        place = user_place(cause)
        at = "" if place is None else f" ({place})"
        raise error(inert(f"{what}: {type(cause).__name__}: {cause}{at}")) from cause


def _is_stray() -> bool:
    """Returns whether a task is running that is not being cancelled."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop
        return False
    return task is not None and not task.cancelling()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ", did you mean 'x'?" if one of the `known` names is like `name`, else ""."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ""
