"""The tool loop: the model speaks, its calls are run and answered, until a limit or its answer.

Invariant: the checks come in the order written in `limits`, and the last tokens of a trajectory
are sampled ones. The states and what leads from one to the next:

    Speak --(asks for something, within the limits)--> Act --(room for the answers)--> Speak
      |                                                 |
      +-----------(a check of `limits` holds)--------> Done

One task runs one trajectory; it waits for the generator in Speak and for the tools in Act.
"""

import enum
from dataclasses import dataclass
from typing import TypeAlias

from treadle.agent_loop.conversation import Conversation, Turn
from treadle.agent_loop.limits import LoopLimits
from treadle.agent_loop.loop import Services
from treadle.agent_loop.renderer import MalformedCall
from treadle.agent_loop.toolbox import Toolbox, selected_tools
from treadle.agent_loop.trajectory import Trajectory
from treadle.agent_loop.types import AgentTask, StopReason, ToolCall
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
class _Done:
    """The end."""

    stop: StopReason


_State: TypeAlias = _Speak | _Act | _Done


class ToolAgentLoop:
    """`tool_agent`: a conversation between the model and its tools.

    Args:
        on_malformed_call: Whether the model is told about calls that cannot be read.
    """

    def __init__(self, *, on_malformed_call: OnMalformedCall = OnMalformedCall.ANSWER) -> None:
        self._on_malformed_call = OnMalformedCall(on_malformed_call)

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        """Attempts the task once.

        Raises:
            RolloutError: The attempt failed.
            SetupError: The row selects a tool that is not there.
        """
        tools = selected_tools(task, services.tools)
        with Conversation(task, services, tools=[tool.spec for tool in tools.values()]) as chat:
            async with Toolbox(task, tools, services.limits, codec=services.renderer) as toolbox:
                stop = await self._converse(chat, toolbox, services.limits)
            return chat.finish(stop, tool_rewards=toolbox.rewards, metrics=toolbox.metrics)

    async def _converse(
        self, chat: Conversation, toolbox: Toolbox, limits: LoopLimits
    ) -> StopReason:
        state: _State = _Speak()
        while True:
            match state:
                case _Speak():
                    async with span("turn", index=chat.assistant_turns):
                        turn = await chat.generate()
                    state = self._after_turn(chat, turn, limits)
                case _Act(requests=requests):
                    chat.doing(f"waiting for tools: {[r.name for r in requests]}")
                    async with span("tools", turn=chat.assistant_turns - 1, calls=len(requests)):
                        answers = await toolbox.run(requests)
                    if any(answer.stop for answer in answers):
                        state = _Done(StopReason.TOOL_STOP)
                    elif stop := chat.answer([answer.message for answer in answers]):
                        state = _Done(stop)
                    else:
                        state = _Speak()
                case _Done(stop=stop):
                    return stop

    def _after_turn(self, chat: Conversation, turn: Turn, limits: LoopLimits) -> _State:
        """Checks 1 to 6 of `limits`."""
        requests = turn.requests
        if self._on_malformed_call is OnMalformedCall.IGNORE:
            requests = tuple(r for r in requests if isinstance(r, ToolCall))
        if turn.closed and not requests:
            return _Done(StopReason.FINISHED)
        stop = chat.length_stop()
        if stop is None and not turn.closed:
            stop = StopReason.TURN_LENGTH
        if stop is None:
            stop = limits.turn_stop(
                assistant_turns=chat.assistant_turns, user_turns=chat.user_turns
            )
        return _Act(requests) if stop is None else _Done(stop)
