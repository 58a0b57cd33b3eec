"""All that training `expression_agent` needs: a function that points it at its session."""

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from train_existing_agent.expression_agent import solve
from treadle.agent_loop.proxy import AgentSession, ProxyAgentLoop


async def attempt(session: AgentSession) -> None:
    """Runs the agent once; what it answers, the run's reward reads in the trajectory."""
    async with AsyncOpenAI(
        base_url=session.base_url,
        api_key=session.api_key,
        # The endpoint is on this machine: no proxy in between, and no certificates to read, for
        # each of many trajectories.
        http_client=DefaultAsyncHttpxClient(verify=False, trust_env=False),
    ) as client:
        await solve(client, session.messages)


class ExpressionAgent(ProxyAgentLoop):
    """The agent, for `agent.loops`."""

    def __init__(self) -> None:
        super().__init__(attempt)
