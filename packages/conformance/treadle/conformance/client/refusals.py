"""Reads refusals: failed calls with the reason and the details that the contract promises.

Invariant: a `Refusal` is complete. `ErrorInfo` with our domain and a reason of the contract came
first, and every other detail has a known type.
"""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from treadle.rollout.v1 import errors_pb2
from treadle.rollout_server.errors import RolloutServerError, TensorMismatch

DOMAIN = "treadle.rollout.v1"
_TRAILER = "grpc-status-details-bin"


class Refused(RolloutServerError):
    """A server refused a call."""

    def __init__(self, refusal: "Refusal") -> None:
        super().__init__(f"{refusal.code} {refusal.reason}: {refusal.message}")
        self.refusal = refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A failed call.

    Attributes:
        code: Name of the gRPC status code.
        reason: An `ErrorReason` without its prefix.
    """

    code: str
    reason: str
    details: tuple[Any, ...]
    message: str

    def detail(self, kind: type[Message]) -> Any:
        """Returns the detail of a type.

        Raises:
            AssertionError: There is no such detail.
        """
        found = [detail for detail in self.details if isinstance(detail, kind)]
        name = kind.DESCRIPTOR.name
        assert found, f"{self.reason} came without its {name}; it has {list(self.details)}"
        return found[0]


def read_refusal(error: grpc.aio.AioRpcError) -> Refusal:
    """Returns the refusal that a failed call carries.

    Raises:
        AssertionError: Its status details do not follow the contract.
    """
    shown = f"{error.code().name}: {error.details()}"
    trailer = dict(error.trailing_metadata() or ()).get(_TRAILER)
    assert isinstance(trailer, bytes), f"{shown} carries no google.rpc.Status"
    status = status_pb2.Status.FromString(trailer)
    details = [_unpacked(packed) for packed in status.details]
    assert details and isinstance(details[0], error_details_pb2.ErrorInfo), (
        f"{shown} does not begin with ErrorInfo but with {details}"
    )
    info = details[0]
    assert info.domain == DOMAIN, f"{shown} is of domain {info.domain!r}, not {DOMAIN!r}"
    reasons = errors_pb2.ErrorReason.keys()
    assert f"ERROR_REASON_{info.reason}" in reasons, f"{shown} has reason {info.reason!r}"
    return Refusal(
        code=error.code().name,
        reason=info.reason,
        details=tuple(details[1:]),
        message=error.details() or "",
    )


async def refusal(call: Awaitable[object], name: str = "a call") -> Refusal:
    """Awaits a call that must be refused, and returns the refusal.

    Args:
        name: Name of the call, for the error message.

    Raises:
        AssertionError: The call succeeded, or failed without the details of the contract.
    """
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return read_refusal(error)
    raise AssertionError(f"{name} that must be refused was answered with {answer!r}")


def as_exception(error: grpc.aio.AioRpcError) -> Exception:
    """Returns the exception that an `Engine` raises where a server refuses."""
    if error.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
        return error
    try:
        found = read_refusal(error)
    except AssertionError:  # Not from the server, for example a broken connection.
        return error
    if found.reason == "TENSOR_MISMATCH":
        mismatch = found.detail(errors_pb2.TensorMismatch)
        return TensorMismatch(mismatch.name, mismatch.expected, mismatch.received)
    return Refused(found)


def _unpacked(packed: Any) -> Message:
    name = packed.type_url.rpartition(".")[2]
    kind = getattr(errors_pb2, name, None) or getattr(error_details_pb2, name, None)
    assert kind is not None, f"a detail of the unknown type {packed.type_url}"
    detail: Message = kind()
    packed.Unpack(detail)
    return detail
