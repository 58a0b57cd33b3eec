"""The ReAct loop: runs a LangGraph graph once per trajectory.

Invariant: the trajectory consists of what the graph's model sampled, whatever the graph. Limits
end it as in `tool_agent`: it does not contain an answer that would leave no room, and its last
tokens are sampled ones. Deadlines and cancellations reach the graph, its completions and its tools.

    def with_a_plan(agent: Agent) -> Graph:
        graph = StateGraph(MessagesState)
        ...
        return graph.compile()

    loop = ReactAgentLoop(with_a_plan)

One object serves all trajectories. The runner waits in `run`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, MessagesState, StateGraph

from treadle.agent_loop.capture import CapturedSession, LimitReachedError
from treadle.agent_loop.errors import LoopError, SetupError
from treadle.agent_loop.langgraph.agent import Agent
from treadle.agent_loop.langgraph.messages import to_langchain
from treadle.agent_loop.langgraph.tools import LangChainTool
from treadle.agent_loop.loops.limits import LoopLimits
from treadle.agent_loop.loops.loop import Services
from treadle.agent_loop.tools.tool import Tool
from treadle.agent_loop.tools.toolbox import Toolbox, selected_tools
from treadle.agent_loop.trajectory import Trajectory
from treadle.agent_loop.types import AgentTask
from treadle.tracing import Metric, Reduce

__all__ = ["Graph", "GraphFactory", "ReactAgentLoop"]

Graph: TypeAlias = Runnable[Any, Any]
"""Accepts `{"messages": [...]}`, like a compiled graph over `MessagesState`."""

GraphFactory: TypeAlias = Callable[[Agent], Graph]
"""Builds a trajectory's graph; called once per trajectory, which takes about 0.5 ms."""


class ReactAgentLoop:
    """Runs agent <-> tools, or your own graph.

    Args:
        tools: LangChain tools in addition to the run's tools. None means those of the class.
        steps_per_turn: Maximum number of nodes that run in sequence per completion; bounds the
            graph's steps together with the limits on turns.

    Attributes:
        tools: LangChain tools; a subclass may list its own.

    Raises:
        ValueError: `steps_per_turn` is below 1.
    """

    tools: Sequence[BaseTool] = ()

    def __init__(
        self,
        graph: GraphFactory | None = None,
        *,
        tools: Sequence[BaseTool] | None = None,
        steps_per_turn: int = 2,
    ) -> None:
        if steps_per_turn < 1:
            raise ValueError(f"steps_per_turn is {steps_per_turn}; it must be at least 1")
        self._graph = graph
        self._steps_per_turn = steps_per_turn
        if tools is not None:
            self.tools = tools
        self._own = {tool.name: LangChainTool(tool) for tool in self.tools}

    def build_graph(self, agent: Agent) -> Graph:
        """Builds the graph of one trajectory; subclasses may override it."""
        if self._graph is not None:
            return self._graph(agent)
        graph = StateGraph(MessagesState)
        graph.add_node("agent", agent.speak)
        graph.add_node("tools", agent.act)
        graph.add_edge(START, "agent")
        graph.add_conditional_edges("agent", agent.should_continue, {True: "tools", False: END})
        graph.add_edge("tools", "agent")
        return graph.compile()

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        """Attempts the task once.

        Raises:
            RolloutError: The attempt failed.
            SetupError: A LangChain tool has the name of one of the run's tools, or the row
                selects an unknown tool.
        """
        limits = services.limits
        tools = selected_tools(task, self._all_tools(services.tools))
        with CapturedSession(task, services) as session:
            async with Toolbox(task, tools, limits, codec=services.renderer) as toolbox:
                agent = Agent(session, toolbox, [tool.spec for tool in tools.values()], services)
                await self._run_graph(agent, task, limits)
            over_cap = Metric("tool/over_cap", agent.model.num_over_cap, Reduce.SUM)
            trajectory = session.finish(agent.model.stop, metrics=(*toolbox.metrics, over_cap))
        return replace(trajectory, tool_rewards=tuple(toolbox.rewards))

    def recursion_limit(self, limits: LoopLimits) -> int:
        """Returns the maximum number of graph steps: those of all allowed turns, plus one."""
        turns = limits.max_response_tokens  # each turn samples at least one token
        if limits.max_assistant_turns is not None:
            turns = min(turns, limits.max_assistant_turns)
        if limits.max_user_turns is not None:
            turns = min(turns, limits.max_user_turns + 1)
        return turns * self._steps_per_turn + 1

    async def _run_graph(self, agent: Agent, task: AgentTask, limits: LoopLimits) -> None:
        steps = self.recursion_limit(limits)
        state = {"messages": [to_langchain(message) for message in task.messages]}
        try:
            await self.build_graph(agent).ainvoke(state, {"recursion_limit": steps})
        except LimitReachedError:
            pass  # a normal end; the session, or the model's `stop`, has the reason
        except GraphRecursionError as error:
            raise LoopError(
                f"the graph of task {task.task_id!r} took more than {steps} steps without an end; "
                f"if its turns have more than {self._steps_per_turn} nodes, say so in "
                "ReactAgentLoop(steps_per_turn=...)"
            ) from error

    def _all_tools(self, configured: Mapping[str, Tool]) -> Mapping[str, Tool]:
        if twice := sorted(self._own.keys() & configured.keys()):
            raise SetupError(
                f"the tools {twice} are both LangChain tools of {type(self).__name__} and tools of "
                "the run; remove them from one of the two"
            )
        return {**configured, **self._own}
