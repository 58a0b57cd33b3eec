"""An OpenAI-compatible endpoint that trains existing agents (extra `[proxy]`).

`ProxyAgentLoop` runs an agent as an agent loop and records its completions; the recording itself
is in `capture/`. No other folder may import starlette or uvicorn. See
`docs/train_an_existing_agent.md`.
"""

from treadle.agent_loop.extras import needs_extra

with needs_extra("proxy", __name__):
    from treadle.agent_loop.proxy.agent import Agent, AgentCrashedError, AgentSession, CommandAgent
    from treadle.agent_loop.proxy.allowances import AgentConstraints
    from treadle.agent_loop.proxy.loop import OnCrash, ProxyAgentLoop
    from treadle.agent_loop.proxy.server import TlsFiles
    from treadle.agent_loop.proxy.sessions import AgentSampling

__all__ = [
    "Agent",
    "AgentConstraints",
    "AgentCrashedError",
    "AgentSampling",
    "AgentSession",
    "CommandAgent",
    "OnCrash",
    "ProxyAgentLoop",
    "TlsFiles",
]
