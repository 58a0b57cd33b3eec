"""The refusal: a call that failed, with the reason and the details that the contract promises.

Invariant: one that exists was complete: `ErrorInfo` of our domain came first, with a reason of
the contract, and every other detail is of a known type.
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
    """A server refused a call; read from the status and its details."""

    def __init__(self, refusal: "Refusal") -> None:
        super().__init__(f"{refusal.code} {refusal.reason}: {refusal.message}")
        self.refusal = refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One failed call.

    Attributes:
        code: Name of the gRPC status.
        reason: An `ErrorReason` without its prefix.
        details: The messages that came after `ErrorInfo`.
        message: For people.
    """

    code: str
    reason: str
    details: tuple[Any, ...]
    message: str

    def detail(self, kind: type[Message]) -> Any:
        """The detail of a type.

        Raises:
            AssertionError: There is none.
        """
        found = [detail for detail in self.details if isinstance(detail, kind)]
        name = kind.DESCRIPTOR.name
        assert found, f"{self.reason} came without its {name}; it has {list(self.details)}"
        return found[0]


def read_refusal(error: grpc.aio.AioRpcError) -> Refusal:
    """Reads what a failed call says.

    Raises:
        AssertionError: It carries no status details of the contract.
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
    """Awaits a call that must fail.

    Args:
        call: It.
        name: Of the call, for whoever reads that it was answered.

    Raises:
        AssertionError: It did not, or not as the contract says.
    """
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return read_refusal(error)
    raise AssertionError(f"{name} that must be refused was answered with {answer!r}")


def as_exception(error: grpc.aio.AioRpcError) -> Exception:
    """What an `Engine` raises where a server refuses."""
    if error.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
        return error
    try:
        found = read_refusal(error)
    except AssertionError:  # Not the server's own words, as a connection that broke.
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
