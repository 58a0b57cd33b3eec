"""Maps a failed call to an exception and to what the client does about it.

Invariant: `RULES` covers every `ErrorReason`, which a test checks. A failure without a reason (no
server, connection lost) is classified by its status code. Pure.
"""

import enum
from dataclasses import dataclass

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from treadle.agent_loop.errors import (
    ContractError,
    EngineFailedError,
    GenerationError,
    GenerationTimeoutError,
    ImageRejectedError,
    OverloadedError,
    PromptTooLongError,
    ReplicaUnavailableError,
    RequestRejectedError,
    WeightVersionBehindError,
)
from treadle.rollout.v1 import errors_pb2

DOMAIN = "treadle.rollout.v1"
DETAILS_KEY = "grpc-status-details-bin"
_PREFIX = "ERROR_REASON_"


class Action(enum.Enum):
    """The client's reaction to a failed call."""

    RAISE = "raise"
    """Raise: the call would fail again, on every replica."""
    WAIT = "wait"
    """The replica is alive and cannot accept the call now: try another one, or this one later."""
    LEAVE = "leave"
    """The replica is gone, failing or behind: try another one, and this one a few more times."""


@dataclass(frozen=True, slots=True)
class StatusRule:
    """How one reason is handled."""

    error: type[GenerationError]
    action: Action


_BUG = StatusRule(RequestRejectedError, Action.RAISE)

RULES: dict[errors_pb2.ErrorReason, StatusRule] = {
    errors_pb2.ERROR_REASON_UNSPECIFIED: StatusRule(ContractError, Action.RAISE),
    errors_pb2.ERROR_REASON_DEADLINE_REQUIRED: _BUG,
    errors_pb2.ERROR_REASON_PROMPT_TOO_LONG: StatusRule(PromptTooLongError, Action.RAISE),
    errors_pb2.ERROR_REASON_OVERLOADED: StatusRule(OverloadedError, Action.WAIT),
    errors_pb2.ERROR_REASON_PAUSED: StatusRule(ReplicaUnavailableError, Action.WAIT),
    errors_pb2.ERROR_REASON_WEIGHT_VERSION_BEHIND: StatusRule(
        WeightVersionBehindError, Action.LEAVE
    ),
    errors_pb2.ERROR_REASON_UPDATE_IN_PROGRESS: _BUG,
    errors_pb2.ERROR_REASON_UPDATE_UNKNOWN: _BUG,
    errors_pb2.ERROR_REASON_TENSOR_MISMATCH: _BUG,
    errors_pb2.ERROR_REASON_CHUNK_OUT_OF_ORDER: _BUG,
    errors_pb2.ERROR_REASON_CHUNK_CORRUPT: _BUG,
    errors_pb2.ERROR_REASON_UPDATE_INCOMPLETE: _BUG,
    errors_pb2.ERROR_REASON_DELTA_BASE_MISMATCH: _BUG,
    errors_pb2.ERROR_REASON_ENGINE_FAILED: StatusRule(EngineFailedError, Action.LEAVE),
    errors_pb2.ERROR_REASON_INVALID_FIELD: _BUG,
    errors_pb2.ERROR_REASON_CAPABILITY_MISSING: _BUG,
    errors_pb2.ERROR_REASON_FILE_OUTSIDE_ROOT: _BUG,
    errors_pb2.ERROR_REASON_FILE_UNREADABLE: _BUG,
    errors_pb2.ERROR_REASON_SHUTTING_DOWN: StatusRule(ReplicaUnavailableError, Action.LEAVE),
    errors_pb2.ERROR_REASON_UNAUTHENTICATED: _BUG,
    errors_pb2.ERROR_REASON_NO_REPLICA: StatusRule(ReplicaUnavailableError, Action.WAIT),
    errors_pb2.ERROR_REASON_SESSION_UNKNOWN: _BUG,
    errors_pb2.ERROR_REASON_STATE_CONFLICT: _BUG,
    errors_pb2.ERROR_REASON_IMAGE_UNREADABLE: StatusRule(ImageRejectedError, Action.RAISE),
    errors_pb2.ERROR_REASON_IMAGE_PLACEHOLDERS: StatusRule(ImageRejectedError, Action.RAISE),
}

# Statuses that gRPC sets itself, without an ErrorReason.
_BY_CODE: dict[grpc.StatusCode, StatusRule] = {
    grpc.StatusCode.UNAVAILABLE: StatusRule(ReplicaUnavailableError, Action.LEAVE),
    grpc.StatusCode.CANCELLED: StatusRule(ReplicaUnavailableError, Action.LEAVE),
    grpc.StatusCode.ABORTED: StatusRule(ReplicaUnavailableError, Action.LEAVE),
    grpc.StatusCode.UNKNOWN: StatusRule(EngineFailedError, Action.LEAVE),
    grpc.StatusCode.INTERNAL: StatusRule(EngineFailedError, Action.LEAVE),
    grpc.StatusCode.DATA_LOSS: StatusRule(EngineFailedError, Action.LEAVE),
    grpc.StatusCode.DEADLINE_EXCEEDED: StatusRule(GenerationTimeoutError, Action.RAISE),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcFailure:
    """A failed call, classified.

    Attributes:
        error: The exception to raise if nothing else helps.
        retry_after_s: The wait that the server requested; None if it requested none.
    """

    address: str
    error: GenerationError
    action: Action
    retry_after_s: float | None = None


def classify(address: str, failed: grpc.aio.AioRpcError) -> RpcFailure:
    """Classifies a failed call."""
    code = failed.code()
    info, retry_after_s = _details(failed)
    reason = "" if info is None or info.domain != DOMAIN else info.reason
    if reason:
        number = dict(errors_pb2.ErrorReason.items()).get(_PREFIX + reason)
        # A newer server may send unknown reasons; its status code still counts.
        rule = _BY_CODE.get(code, _BUG) if number is None else RULES[_reason(number)]
    else:
        rule = _BY_CODE.get(code, _BUG)
    text = f"{address}: {code.name}{' ' + reason if reason else ''}: {failed.details()}"
    return RpcFailure(
        address=address,
        error=rule.error(text),
        action=rule.action,
        retry_after_s=retry_after_s,
    )


def _reason(number: int) -> errors_pb2.ErrorReason:
    return next(reason for reason in RULES if reason == number)


def _details(
    failed: grpc.aio.AioRpcError,
) -> tuple[error_details_pb2.ErrorInfo | None, float | None]:
    """Returns ErrorInfo and the seconds of RetryInfo, each None if absent."""
    packed = dict(failed.trailing_metadata() or ()).get(DETAILS_KEY)
    if not isinstance(packed, bytes):
        return None, None
    info, retry_after_s = None, None
    for detail in status_pb2.Status.FromString(packed).details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return info, retry_after_s
