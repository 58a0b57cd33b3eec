"""The tool interface: what the model may call, and who is at fault when a call fails.

Invariant: a tool is opened at most once per trajectory, at its first call. It keeps its state in
that session, which is closed exactly once when the trajectory ends, however it ends.

There are two ways to fail, which must not be mixed:

- `ToolFailure`: the model's call was wrong. The message is shown to the model.
- Any other exception: the tool failed (sandbox down, bug). The trajectory ends as ERROR and the
  message never reaches the training data.

The loop waits in `call`, at most `LoopLimits.tool_timeout_s`, then cancels it. Calls of one turn
may run concurrently on one session; a session that does not support this needs its own lock.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from treadle.agent_loop.types import AgentTask, Image, ToolSpec, check_image_marks
from treadle.tracing import Metric


class ToolFailure(Exception):
    """The call was wrong; the message tells the model why.

    Args:
        reason: Shown to the model, after the tool's name.
        images: Shown to the model, before the reason.
    """

    images: tuple[Image, ...] = ()  # also of a subclass with an own `__init__`

    def __init__(self, reason: object = "", *, images: tuple[Image, ...] = ()) -> None:
        super().__init__(reason)
        self.images = images

    def __str__(self) -> str:
        return super().__str__().strip() or "it failed and gave no reason"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of a call.

    Attributes:
        content: Shown to the model, truncated to the `LoopLimits` of a tool's text.
        reward: Added to `Trajectory.tool_rewards`; not shown to the model.
        stop: Ends the trajectory; the content is then not shown to the model.
        images: Shown to the model, at the `IMAGE_MARK`s of the content or before it.

    Raises:
        TypeError: The content is not a string.
        ValueError: The number of marks is wrong, or the reward is not finite.
    """

    content: str
    reward: float = 0.0
    stop: bool = False
    metrics: tuple[Metric, ...] = ()
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            raise TypeError(f"content must be a string, got {type(self.content).__name__}")
        if not math.isfinite(self.reward):
            raise ValueError(f"the reward is {self.reward}; it must be a finite number")
        check_image_marks(self.content, self.images)


class ToolSession(Protocol):
    """The state of a tool in one trajectory."""

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        """Runs one call.

        Args:
            arguments: Arguments from the model; not checked against the schema.

        Raises:
            ToolFailure: The call is wrong; the model sees the message.
        """
        ...

    async def aclose(self) -> None:
        """Frees the session's resources. Called once, also after a cancellation."""
        ...


class Tool(Protocol):
    """A tool; one object serves all trajectories."""

    @property
    def spec(self) -> ToolSpec:
        """The description for the model."""
        ...

    async def open(self, task: AgentTask) -> ToolSession:
        """Opens a session for one trajectory."""
        ...


@runtime_checkable
class ChecksTask(Protocol):
    """A tool or an interaction that can check a task's row before the run.

    Without the check `open` would raise at the first call, maybe hours into the run.
    """

    def check_task(self, task: AgentTask) -> None:
        """Checks that the row has what `open` needs; waits for nothing.

        Raises:
            SetupError: The row lacks something; the message names it.
        """
        ...
