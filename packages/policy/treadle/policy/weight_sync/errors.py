"""The trainer's reaction to each reason for which a rollout server refuses a call.

The table covers the contract's `ErrorReason`, as a test checks. A call that fails without a reason
never reached the server's code, so its gRPC status decides.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

__all__ = ["DOMAIN", "OUTCOMES", "Outcome", "WeightSyncError", "explain"]

DOMAIN = "treadle.rollout.v1"


class Outcome(enum.Enum):
    """The publisher's reaction to a failed call."""

    RESUME = "resume"
    """Ask how far the update got, and push the rest."""
    RESTART = "restart"
    """Begin the update again, under a new id."""
    FULL = "full"
    """Begin the update again without delta, under a new id."""
    REPLACE = "replace"
    """Remove this server from the rotation; the others can continue."""
    FATAL = "fatal"
    """End the run: trainer and server are incompatible, and no server would take the call."""


OUTCOMES: Mapping[str, Outcome] = MappingProxyType(
    {
        "DEADLINE_REQUIRED": Outcome.FATAL,
        "PROMPT_TOO_LONG": Outcome.FATAL,
        "OVERLOADED": Outcome.RESUME,
        "PAUSED": Outcome.RESUME,
        "WEIGHT_VERSION_BEHIND": Outcome.FATAL,
        "UPDATE_IN_PROGRESS": Outcome.REPLACE,
        "UPDATE_UNKNOWN": Outcome.RESTART,
        "TENSOR_MISMATCH": Outcome.FATAL,
        "CHUNK_OUT_OF_ORDER": Outcome.RESUME,
        "CHUNK_CORRUPT": Outcome.RESUME,
        "UPDATE_INCOMPLETE": Outcome.RESUME,
        "ENGINE_FAILED": Outcome.REPLACE,
        "INVALID_FIELD": Outcome.FATAL,
        "CAPABILITY_MISSING": Outcome.FATAL,
        "FILE_OUTSIDE_ROOT": Outcome.FATAL,
        "FILE_UNREADABLE": Outcome.RESTART,
        "SHUTTING_DOWN": Outcome.REPLACE,
        "UNAUTHENTICATED": Outcome.FATAL,
        "NO_REPLICA": Outcome.REPLACE,
        "SESSION_UNKNOWN": Outcome.FATAL,
        "STATE_CONFLICT": Outcome.FATAL,
        "IMAGE_UNREADABLE": Outcome.FATAL,
        "IMAGE_PLACEHOLDERS": Outcome.FATAL,
        "DELTA_BASE_MISMATCH": Outcome.FULL,
    }
)
"""Key: `ErrorReason` without its prefix."""


class WeightSyncError(RuntimeError):
    """A call to a server failed; the message names the server, the call and the cause."""

    def __init__(self, message: str, outcome: Outcome) -> None:
        super().__init__(message)
        self.outcome = outcome


def explain(error: grpc.RpcError, *, server: str, call: str) -> WeightSyncError:
    """Returns the error of a failed call, with what to do about it."""
    code, details, reason = error.code(), error.details(), _reason(error)
    if reason is not None:
        outcome = OUTCOMES.get(reason, Outcome.FATAL)
        return WeightSyncError(f"{server}: {call} was refused ({reason}): {details}", outcome)
    broken = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    late = code is grpc.StatusCode.DEADLINE_EXCEEDED
    outcome = Outcome.RESUME if broken or late else Outcome.REPLACE
    return WeightSyncError(f"{server}: {call} failed ({code.name}): {details}", outcome)


def _reason(error: grpc.RpcError) -> str | None:
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # code and message contradict the packed status
        return None
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            return str(info.reason)
    return None
