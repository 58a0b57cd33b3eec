"""LangGraph agents as agent loops (extra `[langgraph]`).

`ReactAgentLoop` runs a LangGraph graph per trajectory. The graph's model is `ChatModel`, a
LangChain chat model over the run's token generator. Its tools are LangChain tools, the run's
tools, or both. Whatever the graph does with its messages, the trajectory holds exactly the tokens
that were sampled. No other folder may import langchain or langgraph. See `docs/langgraph.md`.
"""

from treadle.agent_loop.extras import needs_extra

with needs_extra("langgraph", __name__):
    from treadle.agent_loop.langgraph.agent import Agent, NewMessages
    from treadle.agent_loop.langgraph.chat_model import ChatModel
    from treadle.agent_loop.langgraph.messages import from_langchain, to_langchain
    from treadle.agent_loop.langgraph.react import Graph, ReactAgentLoop
    from treadle.agent_loop.langgraph.tools import LangChainTool, TrajectoryTool, tool_spec

__all__ = [
    "Agent",
    "ChatModel",
    "Graph",
    "LangChainTool",
    "NewMessages",
    "ReactAgentLoop",
    "TrajectoryTool",
    "from_langchain",
    "to_langchain",
    "tool_spec",
]
