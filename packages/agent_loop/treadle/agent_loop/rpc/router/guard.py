"""The router's interceptor: checks token and deadline of every call, and encodes its errors.

Invariant: a method of the routing service runs only for a caller with the right token and a
deadline. Every `RouterFault` that it raises becomes a status with `ErrorInfo`, a typed detail if
the reason has one, and `RetryInfo` if waiting helps. Reflection requires only the token; health
checks require neither.
"""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status.rpc_status import to_status

from treadle.agent_loop.rpc.errors import DOMAIN
from treadle.rollout.v1 import errors_pb2

_OURS = "/treadle.rollout."
_OPEN = "/grpc.health.v1.Health/"
# Without a deadline, time_remaining() returns years.
_NO_DEADLINE_S = 365 * 24 * 3600.0

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in its stub only
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class RouterFault(Exception):
    """An error of a call, with the content of its status.

    Attributes:
        code: gRPC status code.
        reason: Reason in errors.proto.
        retry_after_s: When to retry; None if a retry would not help.
        detail: A typed detail, if the reason has one.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: "errors_pb2.ErrorReason",
        message: str,
        *,
        retry_after_s: float | None = None,
        detail: Message | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.detail = detail

    def to_status(self) -> status_pb2.Status:
        """Returns the status with its details."""
        name = errors_pb2.ErrorReason.Name(self.reason).removeprefix("ERROR_REASON_")
        details: list[Message] = [error_details_pb2.ErrorInfo(reason=name, domain=DOMAIN)]
        if self.detail is not None:
            details.append(self.detail)
        if self.retry_after_s is not None:
            delay = duration(self.retry_after_s)
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        status = status_pb2.Status(code=self.code.value[0], message=str(self))
        for detail in details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        return status


class RouterGuard(grpc.aio.ServerInterceptor):
    """Checks token and deadline, and encodes errors.

    Args:
        token: Required of callers; None admits everyone.
    """

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["_Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        """Wraps the method's handler."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_OPEN):
            return handler
        shown = dict(handler_call_details.invocation_metadata or ()).get("authorization", b"")
        raw = shown if isinstance(shown, bytes) else shown.encode()
        admitted = self._token is None or hmac.compare_digest(raw, self._token)
        if admitted and not method.startswith(_OURS):
            return handler
        inner: Any = handler.unary_unary

        async def call(request: Any, context: Context) -> Any:
            try:
                if not admitted:
                    raise RouterFault(
                        grpc.StatusCode.UNAUTHENTICATED,
                        errors_pb2.ERROR_REASON_UNAUTHENTICATED,
                        f"the call has {'a wrong' if raw else 'no'} token",
                    )
                left_s = context.time_remaining()
                if left_s is None or left_s > _NO_DEADLINE_S:
                    raise RouterFault(
                        grpc.StatusCode.INVALID_ARGUMENT,
                        errors_pb2.ERROR_REASON_DEADLINE_REQUIRED,
                        f"{method} needs a deadline",
                    )
                return await inner(request, context)
            except RouterFault as fault:
                await context.abort_with_status(to_status(fault.to_status()))

        # `call` serves refusals of any method: it answers before it decodes the request.
        return grpc.unary_unary_rpc_method_handler(
            call, handler.request_deserializer, handler.response_serializer
        )


def duration(seconds: float) -> duration_pb2.Duration:
    """Returns seconds as a protobuf duration."""
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(int(seconds * 1e9))
    return delay
