"""The router's interceptor: checks token and deadline of every call, and encodes its errors.

Invariant: a method of the routing service runs only for a caller with the right token and a
deadline. Every `RouterFault` that it raises becomes a status with `ErrorInfo`, a typed detail if
the reason has one, and `RetryInfo` if waiting helps. Reflection requires only the token; health
checks require neither. No message is decoded before these checks, and one of a caller without the
token is not even read. Bytes that do not parse are an error of the caller.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status.rpc_status import to_status

from treadle.agent_loop.rpc.errors import DOMAIN
from treadle.agent_loop.rpc.token_guard import Context, Handler, TokenCheck, refusing
from treadle.rollout.v1 import errors_pb2

_OURS = "/treadle.rollout."
_OPEN = "/grpc.health.v1.Health/"
# Without a deadline, time_remaining() returns years.
_NO_DEADLINE_S = 365 * 24 * 3600.0
_OPEN_MESSAGE_BYTES = 1024  # Anyone may send one; the name of a service fits.


class RouterFault(Exception):
    """An error of a call, with the content of its status.

    Attributes:
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
        self._check = TokenCheck(token)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Wraps the method's handler."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        if method.startswith(_OPEN):
            return _guarded(handler, method, max_bytes=_OPEN_MESSAGE_BYTES)
        problem = self._check.problem(handler_call_details)
        if problem is not None:
            return refusing(partial(_refuse, problem))
        return _guarded(handler, method, max_bytes=None)


async def _refuse(problem: str, context: Context) -> None:
    async with _Statuses("", context):
        raise RouterFault(
            grpc.StatusCode.UNAUTHENTICATED,
            errors_pb2.ERROR_REASON_UNAUTHENTICATED,
            problem,
        )


def _guarded(handler: Handler, method: str, *, max_bytes: int | None) -> Handler:
    """Returns a handler that gets bytes, and decodes them after the checks."""
    encode = handler.response_serializer
    decode = partial(_decode, method, cast("Any", handler.request_deserializer), max_bytes)
    if handler.unary_unary:
        inner: Any = handler.unary_unary

        async def call(raw: bytes, context: Context) -> Any:
            async with _Statuses(method, context):
                return await inner(decode(raw), context)

        return grpc.unary_unary_rpc_method_handler(call, None, encode)
    if handler.unary_stream:
        writes: Any = handler.unary_stream  # Health's Watch, which writes to the context.

        async def watch(raw: bytes, context: Context) -> None:
            async with _Statuses(method, context):
                await writes(decode(raw), context)

        return grpc.unary_stream_rpc_method_handler(watch, None, encode)
    yields: Any = handler.stream_stream  # Reflection, which yields.

    async def stream(raw: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
        async with (
            _Statuses(method, context),
            aclosing(yields(_Decoded(raw, decode), context)) as s,
        ):
            async for response in s:
                yield response

    return grpc.stream_stream_rpc_method_handler(stream, None, encode)


def _decode(method: str, decode: Callable[[bytes], Any], max_bytes: int | None, raw: bytes) -> Any:
    if max_bytes is not None and len(raw) > max_bytes:
        raise invalid("request", f"{len(raw)} bytes long", f"at most {max_bytes} bytes")
    try:
        return decode(raw)
    except DecodeError:
        expected = f"the serialized request message of {method}"
        raise invalid("request", f"{len(raw)} bytes that do not parse", expected) from None


class _Decoded:
    """A stream of requests. A class: a generator in the middle would have to be closed."""

    def __init__(self, raw: AsyncIterator[bytes], decode: Callable[[bytes], Any]) -> None:
        self._raw = aiter(raw)
        self._decode = decode

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return self._decode(await anext(self._raw))


class _Statuses:
    """Surrounds a call: refuses it without a deadline, and makes its errors statuses."""

    def __init__(self, method: str, context: Context) -> None:
        self._method = method
        self._context = context

    async def __aenter__(self) -> None:
        left_s = self._context.time_remaining()
        if self._method.startswith(_OURS) and (left_s is None or left_s > _NO_DEADLINE_S):
            fault = RouterFault(
                grpc.StatusCode.INVALID_ARGUMENT,
                errors_pb2.ERROR_REASON_DEADLINE_REQUIRED,
                f"{self._method} needs a deadline",
            )
            await self._context.abort_with_status(to_status(fault.to_status()))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, RouterFault):
            await self._context.abort_with_status(to_status(error.to_status()))
        unimplemented = grpc.StatusCode.UNIMPLEMENTED
        if isinstance(error, NotImplementedError) and self._context.code() is unimplemented:
            # Generated code says so of a method that is in the .proto and not in the servicer.
            await self._context.abort(
                unimplemented, f"the router does not implement {self._method}"
            )


def invalid(name: str, received: str, expected: str) -> RouterFault:
    """Returns the error for a field with a value that is not accepted."""
    received = received[:200]
    return RouterFault(
        grpc.StatusCode.INVALID_ARGUMENT,
        errors_pb2.ERROR_REASON_INVALID_FIELD,
        f"{name} is {received!r}; expected {expected}",
        detail=errors_pb2.InvalidField(field=name, received=received, expected=expected),
    )


def duration(seconds: float) -> duration_pb2.Duration:
    """Returns seconds as a protobuf duration."""
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(int(seconds * 1e9))
    return delay
