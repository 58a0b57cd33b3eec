"""Captured sessions: agents of any make ask for completions, and their tokens are a trajectory.

`session` is what is asked. `branch` finds what a request continues, by `history`; `stop_strings`
and `call_ids` make of a completion what agents expect.
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
