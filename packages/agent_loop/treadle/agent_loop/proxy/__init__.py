"""Agents of any make, trained: an OpenAI-compatible endpoint that captures what they sample.

Needs the extra `[proxy]` (starlette, uvicorn). `ProxyAgentLoop` runs an agent as an agent loop;
`docs/train_an_existing_agent.md` shows how.
"""

from treadle.agent_loop.proxy.agent import Agent, AgentCrashedError, AgentSession, CommandAgent
from treadle.agent_loop.proxy.loop import OnCrash, ProxyAgentLoop
from treadle.agent_loop.proxy.sessions import AgentSampling

__all__ = [
    "Agent",
    "AgentCrashedError",
    "AgentSampling",
    "AgentSession",
    "CommandAgent",
    "OnCrash",
    "ProxyAgentLoop",
]
