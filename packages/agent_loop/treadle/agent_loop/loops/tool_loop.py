"""The tool loop: the model generates, tools or a simulated user answer, until a check ends it.

Invariant: the checks come in the order written in `limits`, and the last tokens of a trajectory
are sampled ones. The loop has three states:

    GENERATE ---(the model calls tools, within the limits)---> CALL_TOOLS --(room)--> GENERATE
    GENERATE ---(it ends its turn; the row has a simulated user)-> USER_TURN --(room)--> GENERATE
    any state --(a check of `limits` holds)------------------> the end

One task runs one trajectory. It waits for the generator in GENERATE, for the tools in CALL_TOOLS
and for the interaction in USER_TURN.
"""

import enum
from collections.abc import Sequence

from treadle.agent_loop.loops.conversation import Conversation, Turn
from treadle.agent_loop.loops.limits import LoopLimits
from treadle.agent_loop.loops.loop import Services
from treadle.agent_loop.span_content import message_content
from treadle.agent_loop.tokens.renderer import MalformedCall
from treadle.agent_loop.tools.interaction import UserSimulator, selected_interaction
from treadle.agent_loop.tools.toolbox import Toolbox, selected_tools
from treadle.agent_loop.trajectory import Trajectory
from treadle.agent_loop.types import AgentTask, Message, StopReason, ToolCall
from treadle.tracing import span


class OnMalformedCall(enum.StrEnum):
    """What to do with text that was meant as a tool call and cannot be parsed."""

    ANSWER = "answer"
    """Tell the model what is wrong, as the result of the call."""
    IGNORE = "ignore"
    """Treat it as text, as verl does."""


class ToolAgentLoop:
    """`tool_agent`: a conversation between the model, its tools and an interaction.

    Args:
        on_malformed_call: Whether the model is told about calls that cannot be parsed.
    """

    def __init__(self, *, on_malformed_call: OnMalformedCall = OnMalformedCall.ANSWER) -> None:
        self._on_malformed_call = OnMalformedCall(on_malformed_call)

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        """Attempts the task once.

        Raises:
            RolloutError: The attempt failed.
            SetupError: The row names a tool or an interaction that is not configured.
        """
        limits = services.limits
        tools = selected_tools(task, services.tools)
        interaction = selected_interaction(task, services.interactions)
        with Conversation(task, services, tools=[tool.spec for tool in tools.values()]) as chat:
            async with (
                Toolbox(task, tools, limits, codec=services.renderer) as toolbox,
                UserSimulator(task, interaction, limits) as user,
            ):
                stop = await self.converse(chat, toolbox, limits, user=user)
                score = await toolbox.reward()
            return chat.finish(
                stop,
                reward=None if score is None else float(score.value),
                tool_rewards=toolbox.rewards,
                turn_scores=user.scores,
                metrics=(*toolbox.metrics, *user.metrics, *(score.metrics if score else ())),
            )

    async def converse(
        self,
        chat: Conversation,
        toolbox: Toolbox,
        limits: LoopLimits,
        *,
        user: UserSimulator | None = None,
    ) -> StopReason:
        """Runs a conversation to its end; for loops that use it as a part.

        Args:
            chat: Rendered with the toolbox's tools; the model is next.
            user: Answers turns without a call. None means that such a turn ends it.

        Returns:
            Why the conversation ended.

        Raises:
            RolloutError: The conversation failed.
        """
        while True:
            with span("turn", index=chat.assistant_turns) as trace:  # GENERATE
                turn = await chat.generate()
                if trace.recording:
                    trace.set(output=message_content(turn.parsed.message))
            requests = turn.requests
            if self._on_malformed_call is OnMalformedCall.IGNORE:
                requests = tuple(r for r in requests if isinstance(r, ToolCall))
            answer: StopReason | list[Message]
            if requests or not turn.closed:
                answer = await _call_tools(chat, turn, requests, toolbox, limits)
            elif user is not None and user.present:
                answer = await _user_turn(chat, user, limits)
            else:
                answer = StopReason.FINISHED
            if isinstance(answer, StopReason):
                return answer
            if stop := chat.answer(answer):  # checks 8 and 9
                return stop


async def _call_tools(
    chat: Conversation,
    turn: Turn,
    requests: Sequence[ToolCall | MalformedCall],
    toolbox: Toolbox,
    limits: LoopLimits,
) -> StopReason | list[Message]:
    """Runs checks 2 to 7 of `limits` and the tools; returns the limit or the tools' answers."""
    if stop := chat.length_stop():
        return stop
    if not turn.closed:
        return StopReason.TURN_LENGTH
    if stop := _turn_stop(chat, limits):
        return stop
    chat.doing(f"waiting for tools: {[r.name for r in requests]}")
    with span("tools", turn=chat.assistant_turns - 1, calls=len(requests)):
        answers = await toolbox.run(requests)
    if any(answer.stop for answer in answers):
        return StopReason.TOOL_STOP
    return [answer.message for answer in answers]


async def _user_turn(
    chat: Conversation, user: UserSimulator, limits: LoopLimits
) -> StopReason | list[Message]:
    """Asks the simulated user, then runs checks 2 to 6, so that the turn is scored first."""
    chat.doing("waiting for the interaction")
    reply = await user.respond(chat.messages)
    if reply.stop:
        return StopReason.FINISHED
    if stop := chat.length_stop() or _turn_stop(chat, limits):
        return stop
    return [Message(role="user", content=reply.content)]


def _turn_stop(chat: Conversation, limits: LoopLimits) -> StopReason | None:
    """Runs checks 5 and 6 of `limits`."""
    return limits.turn_stop(assistant_turns=chat.assistant_turns, user_turns=chat.user_turns)
