"""Error encoding: domain exception -> gRPC status, reason and typed detail.

Invariant: the table holds every class of `treadle.rollout_server.errors` and, together
with the reasons that belong to other servers, every `ErrorReason`. A failed call always
carries `ErrorInfo`, and at most one typed detail and one `RetryInfo`. A status travels in
HTTP/2 headers, which gRPC limits to 8 KiB, so every text whose length a caller chose is cut.
"""

from collections.abc import Mapping
from types import MappingProxyType

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from treadle.rollout.v1 import errors_pb2 as pb
from treadle.rollout_server import errors

DOMAIN = "treadle.rollout.v1"
_MESSAGE_CHARACTERS = 1000
_FIELD_CHARACTERS = 200
_TENSOR_INDICES = 500

_Row = tuple[grpc.StatusCode, "pb.ErrorReason"]
_CODE = grpc.StatusCode

TABLE: Mapping[type[errors.RolloutServerError], _Row] = MappingProxyType(
    {
        errors.DeadlineRequired: (_CODE.INVALID_ARGUMENT, pb.ERROR_REASON_DEADLINE_REQUIRED),
        errors.Unauthenticated: (_CODE.UNAUTHENTICATED, pb.ERROR_REASON_UNAUTHENTICATED),
        errors.InvalidField: (_CODE.INVALID_ARGUMENT, pb.ERROR_REASON_INVALID_FIELD),
        errors.PromptTooLong: (_CODE.INVALID_ARGUMENT, pb.ERROR_REASON_PROMPT_TOO_LONG),
        errors.ImageUnreadable: (_CODE.INVALID_ARGUMENT, pb.ERROR_REASON_IMAGE_UNREADABLE),
        errors.PlaceholderMismatch: (_CODE.INVALID_ARGUMENT, pb.ERROR_REASON_IMAGE_PLACEHOLDERS),
        errors.CapabilityMissing: (_CODE.UNIMPLEMENTED, pb.ERROR_REASON_CAPABILITY_MISSING),
        errors.Overloaded: (_CODE.RESOURCE_EXHAUSTED, pb.ERROR_REASON_OVERLOADED),
        errors.NotServing: (_CODE.UNAVAILABLE, pb.ERROR_REASON_PAUSED),
        errors.ShuttingDown: (_CODE.UNAVAILABLE, pb.ERROR_REASON_SHUTTING_DOWN),
        errors.StateConflict: (_CODE.FAILED_PRECONDITION, pb.ERROR_REASON_STATE_CONFLICT),
        errors.WeightVersionBehind: (
            _CODE.FAILED_PRECONDITION,
            pb.ERROR_REASON_WEIGHT_VERSION_BEHIND,
        ),
        errors.UpdateInProgress: (_CODE.ABORTED, pb.ERROR_REASON_UPDATE_IN_PROGRESS),
        errors.UpdateUnknown: (_CODE.NOT_FOUND, pb.ERROR_REASON_UPDATE_UNKNOWN),
        errors.TensorMismatch: (_CODE.FAILED_PRECONDITION, pb.ERROR_REASON_TENSOR_MISMATCH),
        errors.ChunkOutOfOrder: (_CODE.OUT_OF_RANGE, pb.ERROR_REASON_CHUNK_OUT_OF_ORDER),
        errors.ChunkCorrupt: (_CODE.DATA_LOSS, pb.ERROR_REASON_CHUNK_CORRUPT),
        errors.UpdateIncomplete: (_CODE.FAILED_PRECONDITION, pb.ERROR_REASON_UPDATE_INCOMPLETE),
        errors.DeltaBaseMismatch: (
            _CODE.FAILED_PRECONDITION,
            pb.ERROR_REASON_DELTA_BASE_MISMATCH,
        ),
        errors.CollectiveBroken: (_CODE.NOT_FOUND, pb.ERROR_REASON_UPDATE_UNKNOWN),
        errors.FileOutsideRoot: (_CODE.PERMISSION_DENIED, pb.ERROR_REASON_FILE_OUTSIDE_ROOT),
        errors.FileMissing: (_CODE.NOT_FOUND, pb.ERROR_REASON_FILE_UNREADABLE),
        errors.FileCorrupt: (_CODE.DATA_LOSS, pb.ERROR_REASON_FILE_UNREADABLE),
        errors.SegmentUnreadable: (_CODE.UNIMPLEMENTED, pb.ERROR_REASON_CAPABILITY_MISSING),
        errors.EngineFailed: (_CODE.INTERNAL, pb.ERROR_REASON_ENGINE_FAILED),
    }
)
"""Exception -> status code and reason."""

ELSEWHERE = frozenset({pb.ERROR_REASON_NO_REPLICA, pb.ERROR_REASON_SESSION_UNKNOWN})
"""Reasons that only the routing service returns."""


def reason_name(error: errors.RolloutServerError) -> str:
    """Returns the reason as it is sent: without its prefix."""
    return pb.ErrorReason.Name(TABLE[type(error)][1]).removeprefix("ERROR_REASON_")


def message_of(error: errors.RolloutServerError) -> str:
    """Returns the error's message as it is sent."""
    return _cut(str(error), _MESSAGE_CHARACTERS)


def to_status(error: errors.RolloutServerError) -> tuple[grpc.StatusCode, status_pb2.Status]:
    """Returns the status of a failed call, with its details packed."""
    code, _ = TABLE[type(error)]
    status = status_pb2.Status(code=code_pb2.Code.Value(code.name), message=message_of(error))
    details: list[Message | None] = [
        error_details_pb2.ErrorInfo(reason=reason_name(error), domain=DOMAIN),
        _detail(error),
        _retry_info(error),
    ]
    for detail in details:
        if detail is not None:
            status.details.add().Pack(detail)
    return code, status


def _detail(error: errors.RolloutServerError) -> Message | None:
    match error:
        case errors.InvalidField():
            return pb.InvalidField(
                field=error.field,
                received=_cut(error.received, _FIELD_CHARACTERS),
                expected=error.expected,
            )
        case errors.PromptTooLong():
            return pb.PromptTooLong(
                prompt_tokens=error.prompt_tokens, context_length=error.context_length
            )
        case errors.ImageUnreadable():
            return pb.ImageUnreadable(
                image_index=error.image_index,
                media_type=_cut(error.media_type, _FIELD_CHARACTERS),
                problem=_cut(error.problem, _FIELD_CHARACTERS),
            )
        case errors.PlaceholderMismatch():
            return pb.ImagePlaceholders(
                image_index=error.image_index,
                first_placeholder=error.first_placeholder,
                received=error.received,
                expected=error.expected,
            )
        case errors.WeightVersionBehind():
            return pb.WeightVersionBehind(serving=error.serving, wanted=error.wanted)
        case errors.UpdateInProgress():
            left = duration_pb2.Duration()
            left.FromMilliseconds(round(error.lease_left_s * 1000))
            return pb.UpdateInProgress(update_id=error.update_id, lease_left=left)
        case errors.TensorMismatch():
            return pb.TensorMismatch(
                name=_cut(error.name, _FIELD_CHARACTERS),
                expected=_cut(error.expected, _FIELD_CHARACTERS),
                received=_cut(error.received, _FIELD_CHARACTERS),
            )
        case errors.ChunkOutOfOrder():
            return pb.ChunkOutOfOrder(
                tensor_index=error.tensor_index, expected_offset=error.expected_offset
            )
        case errors.DeltaBaseMismatch():
            return pb.DeltaBaseMismatch(held=error.held, wanted=error.wanted)
        case errors.UpdateIncomplete():
            return pb.UpdateIncomplete(tensor_indices=error.tensor_indices[:_TENSOR_INDICES])
        case _:
            return None


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[: characters - 3]}..."


def _retry_info(error: errors.RolloutServerError) -> Message | None:
    if not isinstance(error, errors.Overloaded | errors.NotServing):
        return None
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(round(error.retry_after_s * 1000))
    info: Message = error_details_pb2.RetryInfo(retry_delay=delay)
    return info
