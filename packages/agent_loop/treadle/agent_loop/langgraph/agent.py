"""The agent: the parts of a graph in one trajectory, which are a model, tools and nodes.

Invariant: calls are answered in the trajectory's toolbox and completions come from its session,
whichever graph connects them. `speak`, `act` and `should_continue` are the nodes and the edge of
`ReactAgentLoop`'s graph. Your own graph may use any of them, or only the model and the tools. The
checks are those of `limits`, in the same order.

A graph waits in `speak` for the generator and in `act` for tools.
"""

from collections.abc import Iterable, Sequence
from typing import TypedDict

from langchain_core.messages import AIMessage, BaseMessage
from langgraph.graph import MessagesState

from treadle.agent_loop.capture import CapturedSession
from treadle.agent_loop.langgraph.chat_model import ChatModel
from treadle.agent_loop.langgraph.messages import to_langchain
from treadle.agent_loop.langgraph.tools import TrajectoryTool
from treadle.agent_loop.loops.loop import Services
from treadle.agent_loop.tokens.renderer import MalformedCall
from treadle.agent_loop.tools.toolbox import ToolAnswer, Toolbox
from treadle.agent_loop.types import Message, StopReason, ToolCall, ToolSpec

__all__ = ["Agent", "NewMessages"]


class NewMessages(TypedDict):
    """The messages that a node adds to the state."""

    messages: list[BaseMessage]


class Agent:
    """The model and the tools of one trajectory.

    Args:
        services: The run's services; used for the limits and the watchdog's pulse.

    Attributes:
        model: Samples messages. Not yet bound to the tools.
        tools: The tools, for `model.bind_tools` and for LangGraph's `ToolNode`.
    """

    def __init__(
        self,
        session: CapturedSession,
        toolbox: Toolbox,
        specs: Iterable[ToolSpec],
        services: Services,
    ) -> None:
        self._session = session
        self._toolbox = toolbox
        self._pulse = services.pulse
        limits = services.limits
        self.model = ChatModel(session=session, max_parallel_calls=limits.max_parallel_calls)
        self.tools = tuple(TrajectoryTool.of(spec, self._answer_call) for spec in specs)
        self._speaker = self.model.bind_tools(self.tools)

    async def speak(self, state: MessagesState) -> NewMessages:
        """Node: samples the model's turn."""
        return {"messages": [await self._speaker.ainvoke(state["messages"])]}

    async def act(self, state: MessagesState) -> NewMessages:
        """Node: runs the last message's calls concurrently, and answers malformed ones."""
        answers = await self._run(self.model.requests(_last(state)))
        return {"messages": [to_langchain(answer.message) for answer in answers]}

    def should_continue(self, state: MessagesState) -> bool:
        """Edge: returns whether the last message has calls that may be answered."""
        message = _last(state)
        if not self.model.requests(message) or not self.model.is_closed(message):
            return False
        if (stop := self._session.exhausted) is not None:
            self.model.end(stop)
        return stop is None

    async def _answer_call(self, call: ToolCall) -> Message:
        (answer,) = await self._run([call])
        return answer.message

    async def _run(self, requests: Sequence[ToolCall | MalformedCall]) -> list[ToolAnswer]:
        names = [request.name for request in requests]
        self._pulse.beat(f"waiting for tools: {names} in session {self._session.session_id}")
        answers = await self._toolbox.run(requests)
        self._pulse.beat(f"between turns in session {self._session.session_id}")
        if any(answer.stop for answer in answers):
            self.model.end(StopReason.TOOL_STOP)
        return answers


def _last(state: MessagesState) -> AIMessage:
    message = state["messages"][-1]
    if not isinstance(message, AIMessage):
        raise TypeError(
            f"the last message is a {type(message).__name__}; this node follows the model's turn"
        )
    return message
