"""Captured sessions: record the completions of any agent as a trajectory.

`session` answers the agent's requests, `session_record` keeps the answers; `branch` and `history`
find which recorded conversation a request continues; `streamed_text` returns what of a turn can be
shown while it is sampled; `stop_strings` and `call_ids` adapt a completion to what agents expect.
Formats of requests (OpenAI, LangChain) belong in `proxy/` and `langgraph/`.
"""

from treadle.agent_loop.capture.branch import Continuation
from treadle.agent_loop.capture.session import (
    CapturedSession,
    LimitReachedError,
    SessionEndedError,
)
from treadle.agent_loop.capture.session_record import CapturedTurn
from treadle.agent_loop.capture.streamed_text import TurnDelta

__all__ = [
    "CapturedSession",
    "CapturedTurn",
    "Continuation",
    "LimitReachedError",
    "SessionEndedError",
    "TurnDelta",
]
