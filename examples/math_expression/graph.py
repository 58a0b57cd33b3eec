"""The math expression agent, written with LangChain alone: its tool and a custom graph.

The model gets one line of encouragement when it wants to answer without having called the tool.
Whatever the graph does, the trajectory is what the model sampled.

    agent.loops.react_agent=math_expression.graph:Encouraged agent.tool_catalogue=null
"""

from langchain_core.messages import HumanMessage
from langchain_core.tools import ToolException, tool
from langgraph.graph import END, START, MessagesState, StateGraph

from treadle.agent_loop.langgraph import Agent, Graph, NewMessages, ReactAgentLoop


@tool
async def calculate(a: int, b: int, operand: str) -> str:
    """Apply an operator to two numbers."""
    match operand:
        case "+":
            return str(a + b)
        case "-":
            return str(a - b)
        case "*":
            return str(a * b)
        case "@":
            return str(3 * a - 2 * b)
    raise ToolException(f"operand is {operand!r}; expected one of + - * @")


class Encouraged(ReactAgentLoop):
    """agent <-> tools, and a word from the user where no tool was asked."""

    tools = (calculate,)

    def build_graph(self, agent: Agent) -> Graph:
        """Makes the graph of one trajectory."""

        async def encourage(state: MessagesState) -> NewMessages:
            return {"messages": [HumanMessage("Use the tool.")]}

        def after_agent(state: MessagesState) -> str:
            if agent.should_continue(state):
                return "tools"
            kinds = [message.type for message in state["messages"]]
            return "encourage" if kinds.count("ai") == 1 and "tool" not in kinds else END

        graph = StateGraph(MessagesState)
        graph.add_node("agent", agent.speak)
        graph.add_node("tools", agent.act)
        graph.add_node("encourage", encourage)
        graph.add_edge(START, "agent")
        graph.add_conditional_edges("agent", after_agent, ["tools", "encourage", END])
        graph.add_edge("tools", "agent")
        graph.add_edge("encourage", "agent")
        return graph.compile()
