"""The tool loop: the model speaks, and its tools or an interaction answer, until it is done.

Invariant: the checks come in the order written in `limits`, and the last tokens of a trajectory
are sampled ones. The states and what leads from one to the next:

    Speak --(asks for something, within the limits)--> Act --(room for the answers)--> Speak
    Speak --(ends its turn, and the row names an interaction)--> Listen --(room)-----> Speak
    Speak, Act, Listen --(a check of `limits` holds)--> Done

One task runs one trajectory; it waits for the generator in Speak, for the tools in Act and for
the interaction in Listen.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from treadle.agent_loop.loops.conversation import Conversation, Turn
from treadle.agent_loop.loops.limits import LoopLimits
from treadle.agent_loop.loops.loop import Services
from treadle.agent_loop.tokens.renderer import MalformedCall
from treadle.agent_loop.tools.interaction import Respondent, selected_interaction
from treadle.agent_loop.tools.toolbox import Toolbox, selected_tools
from treadle.agent_loop.trajectory import Trajectory
from treadle.agent_loop.types import AgentTask, Message, StopReason, ToolCall
from treadle.tracing import span


class OnMalformedCall(enum.StrEnum):
    """What becomes of text that was meant as a call and is none."""

    ANSWER = "answer"
    """The model is told what is wrong with it, as the result of the call."""
    IGNORE = "ignore"
    """It counts as text, as in verl."""


@dataclass(frozen=True, slots=True)
class _Speak:
    """The model's turn."""


@dataclass(frozen=True, slots=True)
class _Act:
    """The tools' turn."""

    requests: tuple[ToolCall | MalformedCall, ...]


@dataclass(frozen=True, slots=True)
class _Listen:
    """The interaction's turn."""


@dataclass(frozen=True, slots=True)
class _Done:
    """The end."""

    stop: StopReason


_State: TypeAlias = _Speak | _Act | _Listen | _Done


class ToolAgentLoop:
    """`tool_agent`: a conversation between the model, its tools and an interaction.

    Args:
        on_malformed_call: Whether the model is told about calls that cannot be read.
    """

    def __init__(self, *, on_malformed_call: OnMalformedCall = OnMalformedCall.ANSWER) -> None:
        self._on_malformed_call = OnMalformedCall(on_malformed_call)

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        """Attempts the task once.

        Raises:
            RolloutError: The attempt failed.
            SetupError: The row names a tool or an interaction that is not there.
        """
        limits = services.limits
        tools = selected_tools(task, services.tools)
        interaction = selected_interaction(task, services.interactions)
        with Conversation(task, services, tools=[tool.spec for tool in tools.values()]) as chat:
            async with (
                Toolbox(task, tools, limits, codec=services.renderer) as toolbox,
                Respondent(task, interaction, limits) as respondent,
            ):
                stop = await self.converse(chat, toolbox, limits, respondent=respondent)
            return chat.finish(
                stop,
                tool_rewards=toolbox.rewards,
                turn_scores=respondent.scores,
                metrics=(*toolbox.metrics, *respondent.metrics),
            )

    async def converse(
        self,
        chat: Conversation,
        toolbox: Toolbox,
        limits: LoopLimits,
        *,
        respondent: Respondent | None = None,
    ) -> StopReason:
        """Takes a conversation to its end; for loops that make it part of a larger one.

        Args:
            chat: Rendered with the toolbox's tools; the model is next.
            toolbox: Answers its calls.
            limits: Bound the conversation.
            respondent: Answers turns without a call. None: such a turn ends it.

        Returns:
            Why it ended.

        Raises:
            RolloutError: It failed.
        """
        heard = respondent is not None and respondent.present
        state: _State = _Speak()
        while True:
            match state:
                case _Speak():
                    async with span("turn", index=chat.assistant_turns):
                        turn = await chat.generate()
                    state = self._after_turn(chat, turn, limits, heard=heard)
                case _Act(requests=requests):
                    chat.doing(f"waiting for tools: {[r.name for r in requests]}")
                    async with span("tools", turn=chat.assistant_turns - 1, calls=len(requests)):
                        answers = await toolbox.run(requests)
                    if any(answer.stop for answer in answers):
                        state = _Done(StopReason.TOOL_STOP)
                    else:
                        state = _give(chat, [answer.message for answer in answers])
                case _Listen():
                    assert respondent is not None, "only who is there is listened to"
                    chat.doing("waiting for the interaction")
                    reply = await respondent.respond(chat.messages)
                    if reply.stop:
                        state = _Done(StopReason.FINISHED)
                    elif stop := _limit(chat, limits):
                        state = _Done(stop)
                    else:
                        state = _give(chat, [Message(role="user", content=reply.content)])
                case _Done(stop=stop):
                    return stop

    def _after_turn(
        self, chat: Conversation, turn: Turn, limits: LoopLimits, *, heard: bool
    ) -> _State:
        """Checks 1 to 6 of `limits`; those of a turn that is heard come after the reply."""
        requests = turn.requests
        if self._on_malformed_call is OnMalformedCall.IGNORE:
            requests = tuple(r for r in requests if isinstance(r, ToolCall))
        if turn.closed and not requests:
            return _Listen() if heard else _Done(StopReason.FINISHED)
        stop = chat.length_stop()
        if stop is None and not turn.closed:
            stop = StopReason.TURN_LENGTH
        stop = stop or _limit(chat, limits)
        return _Act(requests) if stop is None else _Done(stop)


def _limit(chat: Conversation, limits: LoopLimits) -> StopReason | None:
    """Checks 2, 3, 5 and 6 of `limits`."""
    return chat.length_stop() or limits.turn_stop(
        assistant_turns=chat.assistant_turns, user_turns=chat.user_turns
    )


def _give(chat: Conversation, messages: Sequence[Message]) -> _State:
    """Checks 8 and 9 of `limits`."""
    stop = chat.answer(messages)
    return _Speak() if stop is None else _Done(stop)
