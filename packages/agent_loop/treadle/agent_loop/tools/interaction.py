"""Interactions: simulated users, which answer turns without a tool call and may score them.

Invariant: an interaction is opened at most once per trajectory, at its first reply. It keeps its
state in that session, which is closed exactly once, however the trajectory ends. It is asked once
for every turn that the model ends without a call. Each score that it gives is in
`Trajectory.turn_scores`, even if no room is left for its text.

A row names its interaction in `extra_info.interaction_kwargs.name`; the other keys there are the
interaction's own. The trajectory of a row that names none ends with the first turn without a call.

The loop waits in `respond`, at most `LoopLimits.tool_timeout_s`. Any error there, a timeout
included, fails the attempt, because the model is not at fault.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from treadle.agent_loop.errors import InteractionError, SetupError, boundary
from treadle.agent_loop.loops.limits import LoopLimits
from treadle.agent_loop.tools.session_cleanup import close_all
from treadle.agent_loop.turning_limit import TurningLimit
from treadle.agent_loop.types import AgentTask, Message
from treadle.agent_loop.user_calls import end_if_cancelled
from treadle.tracing import Metric, Reduce, span

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class InteractionReply:
    """An interaction's answer to a turn.

    Attributes:
        score: Score of the turn. None means not scored, which differs from a score of 0.
        stop: Ends the conversation as FINISHED; the content is then not shown to the model.

    Raises:
        TypeError: The content is not a string.
        ValueError: The score is not finite.
    """

    content: str
    score: float | None = None
    stop: bool = False
    metrics: tuple[Metric, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            raise TypeError(f"content must be a string, got {type(self.content).__name__}")
        if self.score is not None and not math.isfinite(self.score):
            raise ValueError(f"the score is {self.score}; it must be a finite number")


class InteractionSession(Protocol):
    """The state of an interaction in one trajectory."""

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        """Answers the last message, which is the assistant's."""
        ...

    async def aclose(self) -> None:
        """Frees the session's resources. Called once, also after a cancellation."""
        ...


class Interaction(Protocol):
    """A simulated user; one object serves all trajectories."""

    async def open(self, task: AgentTask) -> InteractionSession:
        """Opens a session for one trajectory."""
        ...


def selected_interaction(
    task: AgentTask, interactions: Mapping[str, Interaction]
) -> Interaction | None:
    """Returns the interaction that the task's row names, or None if it names none.

    Args:
        task: `fields["extra_info"]["interaction_kwargs"]["name"]` is a name, None or absent.

    Raises:
        SetupError: No interaction has this name; or the row has settings for an interaction and
            no name, although interactions are configured.
    """
    extra = task.fields.get("extra_info")
    kwargs = extra.get("interaction_kwargs") if isinstance(extra, Mapping) else None
    if not isinstance(kwargs, Mapping):
        if kwargs is None:
            return None
        raise SetupError(
            f"task {task.task_id!r}: interaction_kwargs must be a mapping, got {kwargs!r:.80}"
        )
    # A parquet column of structs holds null for each key that only other rows have.
    given = {key: value for key, value in kwargs.items() if value is not None}
    if not given:
        return None
    configured = f"configured interactions: {sorted(interactions)}"
    if "name" not in given:
        if not interactions:  # rows of verl's tool examples have settings that are never read
            return None
        raise SetupError(
            f"task {task.task_id!r}: interaction_kwargs has {sorted(given)} and no name; "
            f"{configured}"
        )
    name = given["name"]
    if not isinstance(name, str) or name not in interactions:
        raise SetupError(
            f"task {task.task_id!r}: interaction_kwargs names {name!r}, which is not configured; "
            f"{configured}"
        )
    return interactions[name]


class UserSimulator:
    """The simulated user of one trajectory: calls its interaction, and collects the scores.

    Args:
        interaction: The interaction that replies; None if the row has none.
        limits: Bounds of one reply and of closing.

    Attributes:
        present: Whether there is an interaction.
        scores: Scores of the turns so far; turns that were not scored are left out.
    """

    def __init__(
        self, task: AgentTask, interaction: Interaction | None, limits: LoopLimits
    ) -> None:
        self._task = task
        self._interaction = interaction
        self._limits = limits
        self._session: InteractionSession | None = None
        self._metrics: list[Metric] = []
        self._num_replies = 0
        self.present = interaction is not None
        self.scores: list[float] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._session is not None:
            await close_all(
                {"an interaction": self._session},
                error=InteractionError,
                timeout_s=self._limits.close_timeout_s,
                report_leak=self._report_leak,
            )

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The interaction's own metrics, then the number of its replies."""
        if not self.present:
            return ()
        return (*self._metrics, Metric("interaction/replies", self._num_replies, Reduce.SUM))

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        """Asks for a reply to the last message, and keeps its score.

        Raises:
            InteractionError: The interaction failed, or took longer than
                `LoopLimits.tool_timeout_s`.
        """
        assert self._interaction is not None, "check `present` before asking"
        async with span("interaction") as trace:
            with boundary(InteractionError, f"the interaction of task {self._task.task_id!r}"):
                async with TurningLimit(self._limits.tool_timeout_s) as limit:
                    if self._session is None:
                        opening = limit.own(self._interaction.open(self._task))
                        self._session = await end_if_cancelled("the interaction", opening)
                    work = limit.own(self._session.respond(messages))
                    reply = await end_if_cancelled("the interaction", work)
                if not isinstance(reply, InteractionReply):
                    raise TypeError(f"respond() must return an InteractionReply, got {reply!r:.80}")
            trace.set(output={"content": reply.content, "score": reply.score, "stop": reply.stop})
        self._num_replies += 1
        self._metrics.extend(reply.metrics)
        if reply.score is not None:
            self.scores.append(reply.score)
        return reply

    def _report_leak(self, what: str) -> None:
        """Logs a session that could not be closed."""
        _log.warning("task %s: %s", self._task.task_id, what)
