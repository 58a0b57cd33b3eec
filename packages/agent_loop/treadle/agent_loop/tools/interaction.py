"""Interactions: who answers the model where no tool does, as a user would, and scores its turns.

Invariant: an interaction is opened at most once per trajectory (at its first reply), keeps its
state in that session, and the session is closed exactly once, however the trajectory ends. It is
asked once for every turn that the model ends without a call; each score that it gives is in
`Trajectory.turn_scores`, also where no room is left for its text.

A row names its interaction in `extra_info.interaction_kwargs.name`; what else is there belongs to
the interaction. A row that names none has no one to talk to, and its trajectory ends with the
first turn without a call.

The loop waits in `respond`, at most `LoopLimits.tool_timeout_s`. Whatever it raises, that limit
included, fails the attempt: the model has done nothing wrong.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from treadle.agent_loop.errors import InteractionError, SetupError, boundary
from treadle.agent_loop.loops.limits import LoopLimits
from treadle.agent_loop.tools.session_cleanup import close_all
from treadle.agent_loop.types import AgentTask, Message
from treadle.tracing import Metric, Reduce, span

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class InteractionReply:
    """What a turn is answered with.

    Attributes:
        content: The user's next message.
        score: Of the turn. None: it says nothing about it, which is not a score of 0.
        stop: The conversation is over, as FINISHED; the content is then not shown to the model.
        metrics: Carried into `Trajectory.metrics`.

    Raises:
        TypeError: The content is no text.
        ValueError: The score is not finite.
    """

    content: str
    score: float | None = None
    stop: bool = False
    metrics: tuple[Metric, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            raise TypeError(f"content must be a text, not {type(self.content).__name__}")
        if self.score is not None and not math.isfinite(self.score):
            raise ValueError(f"the score is {self.score}; it must be a finite number")


class InteractionSession(Protocol):
    """An interaction's state in one trajectory."""

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        """Answers the last message, which is the assistant's.

        Args:
            messages: The whole conversation.
        """
        ...

    async def aclose(self) -> None:
        """Frees what `open` took. Called once, also after a cancellation."""
        ...


class Interaction(Protocol):
    """A simulated user; one object serves all trajectories."""

    async def open(self, task: AgentTask) -> InteractionSession:
        """Begins the state of one trajectory."""
        ...


def selected_interaction(
    task: AgentTask, interactions: Mapping[str, Interaction]
) -> Interaction | None:
    """Returns the interaction that the task's row names; None when it names none.

    Args:
        task: `fields["extra_info"]["interaction_kwargs"]["name"]` is a name, None or absent.
        interactions: By name.

    Raises:
        SetupError: The name is not there; or the row has settings for an interaction and no name,
            though there are interactions.
    """
    extra = task.fields.get("extra_info")
    kwargs = extra.get("interaction_kwargs") if isinstance(extra, Mapping) else None
    if not isinstance(kwargs, Mapping):
        if kwargs is None:
            return None
        raise SetupError(
            f"task {task.task_id!r}: interaction_kwargs is {kwargs!r:.80}; it is a mapping"
        )
    # A parquet column of structs holds null for every key that any other row has.
    given = {key: value for key, value in kwargs.items() if value is not None}
    if not given:
        return None
    configured = f"configured interactions: {sorted(interactions)}"
    if "name" not in given:
        if not interactions:  # rows of verl's tool examples have settings that nobody reads
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


class Respondent:
    """The interaction of one trajectory.

    Args:
        task: Handed to `Interaction.open`.
        interaction: Asked. None: nobody is; `present` says so.
        limits: Bound one reply, and the closing.

    Attributes:
        present: Whether there is an interaction.
        scores: Of the turns so far, those that were scored.
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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await close_all(
                {"an interaction": self._session},
                error=InteractionError,
                timeout_s=self._limits.close_timeout_s,
                leaks=self._leaks,
            )

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What the interaction reported, and how often it was asked."""
        if not self.present:
            return ()
        return (*self._metrics, Metric("interaction/replies", self._num_replies, Reduce.SUM))

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        """Asks for a reply to the last message, and keeps its score.

        Raises:
            InteractionError: It failed, or took longer than `LoopLimits.tool_timeout_s`.
        """
        assert self._interaction is not None, "nobody is there to respond"
        async with span("interaction"):
            with boundary(InteractionError, f"the interaction of task {self._task.task_id!r}"):
                async with asyncio.timeout(self._limits.tool_timeout_s):
                    if self._session is None:
                        self._session = await self._interaction.open(self._task)
                    reply = await self._session.respond(messages)
                if not isinstance(reply, InteractionReply):
                    raise TypeError(f"respond() gave {reply!r:.80}, which is no InteractionReply")
        self._num_replies += 1
        self._metrics.extend(reply.metrics)
        if reply.score is not None:
            self.scores.append(reply.score)
        return reply

    def _leaks(self, what: str) -> None:
        """Names what could not be closed."""
        _logger.warning("task %s: %s", self._task.task_id, what)
