"""Captured sessions: record the completions of any agent as a trajectory.

`session` answers the agent's requests; `branch` and `history` find which recorded conversation a
request continues; `stop_strings` and `call_ids` adapt a completion to what agents expect. Formats
of requests (OpenAI, LangChain) belong in `proxy/` and `langgraph/`.
"""

from treadle.agent_loop.capture.branch import Continuation
from treadle.agent_loop.capture.session import (
    CapturedSession,
    CapturedTurn,
    LimitReachedError,
    SessionEndedError,
)

__all__ = [
    "CapturedSession",
    "CapturedTurn",
    "Continuation",
    "LimitReachedError",
    "SessionEndedError",
]
