"""Tools: what the model may call, and whose fault it is when a call fails.

Invariant: a tool is opened at most once per trajectory (at its first call), keeps its state in
that session, and the session is closed exactly once when the trajectory ends, however it ends.

Two ways to fail, never mixed:

- raise `ToolFailure`: the model asked for something wrong. Its text is shown to the model.
- raise anything else: we failed (sandbox down, bug). The trajectory ends as ERROR and the text
  never reaches the training data.

The loop waits in `call`, at most `LoopLimits.tool_timeout_s`, then cancels it. Calls of one turn
may run at the same time on one session; a session that cannot bear it holds its own lock.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from treadle.agent_loop.types import AgentTask, Image, ToolSpec, check_image_marks
from treadle.tracing import Metric


class ToolFailure(Exception):
    """The call was wrong; the text tells the model why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a call gives back.

    Attributes:
        content: Shown to the model, cut to what `LoopLimits` allow a tool's text.
        reward: Carried into `Trajectory.tool_rewards`; not shown to the model.
        stop: End the trajectory; the content is then not shown to the model.
        metrics: Carried into `Trajectory.metrics`.
        images: Shown to the model, at the `IMAGE_MARK`s of the content or before it.

    Raises:
        TypeError: The content is no text.
        ValueError: The marks do not fit the images, or the reward is not finite.
    """

    content: str
    reward: float = 0.0
    stop: bool = False
    metrics: tuple[Metric, ...] = ()
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            raise TypeError(f"content must be a text, not {type(self.content).__name__}")
        if not math.isfinite(self.reward):
            raise ValueError(f"the reward is {self.reward}; it must be a finite number")
        check_image_marks(self.content, self.images)


class ToolSession(Protocol):
    """A tool's state in one trajectory."""

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        """Runs one call.

        Args:
            arguments: As the model wrote them; not checked against the schema.

        Raises:
            ToolFailure: The model's fault; it sees the text.
        """
        ...

    async def aclose(self) -> None:
        """Frees what `open` took. Called once, also after a cancellation."""
        ...


class Tool(Protocol):
    """A tool that trajectories can open; one object serves all of them."""

    @property
    def spec(self) -> ToolSpec:
        """What the model is told."""
        ...

    async def open(self, task: AgentTask) -> ToolSession:
        """Begins the tool's state for one trajectory."""
        ...


@runtime_checkable
class ChecksTask(Protocol):
    """A tool or an interaction that needs something of a task's row, and can tell beforehand.

    Its `open` would raise too, but at the first call, when the run has gone on for hours.
    """

    def check_task(self, task: AgentTask) -> None:
        """Looks at the task as `open` will; waits for nothing.

        Raises:
            SetupError: What `open` needs is not in the row; the text says what.
        """
        ...
