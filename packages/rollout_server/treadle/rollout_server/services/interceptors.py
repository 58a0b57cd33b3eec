"""The guard: what holds for every call before and after its handler.

Invariant: a handler of our services runs only for a caller with the right token and a
deadline, and every `RolloutServerError` it raises leaves as a status with details. Other
services (health, reflection) need the token only, and health not even that, so that a
probe without credentials works.

An exception that is none of ours is a bug: it is logged with its trace and leaves as
INTERNAL without details. Cancellation passes through untouched.
"""

import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio

from treadle.rollout_server.errors import (
    DeadlineRequired,
    RolloutServerError,
    Unauthenticated,
)
from treadle.rollout_server.services.errors import message_of, reason_name, to_status

_log = logging.getLogger(__name__)
_OURS = "/treadle.rollout."
_OPEN = "/grpc.health.v1.Health/"
# What time_remaining() gives a call without a deadline is years.
_NO_DEADLINE_S = 365 * 24 * 3600.0

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in its stub only
_MaybeHandler: TypeAlias = "_Handler | None"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Guard(grpc.aio.ServerInterceptor):
    """Checks token and deadline, encodes errors, logs calls.

    Args:
        token: What callers must show; None admits everyone.
    """

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_MaybeHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _MaybeHandler:
        """Wraps the method's handler."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_OPEN):
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        problem = self._problem(metadata.get("authorization"))
        return _wrapped(handler, method, problem)

    def _problem(self, shown: str | bytes | None) -> Unauthenticated | None:
        if self._token is None:
            return None
        if shown is None:
            return Unauthenticated("the call carries no token")
        raw = shown if isinstance(shown, bytes) else shown.encode()
        if not hmac.compare_digest(raw, b"Bearer " + self._token):
            return Unauthenticated("the call carries a wrong token")
        return None


def _wrapped(handler: _Handler, method: str, problem: Unauthenticated | None) -> _Handler:
    codec = (handler.request_deserializer, handler.response_serializer)
    if handler.unary_unary:
        call = _guard_unary(handler.unary_unary, method, problem)
        return grpc.unary_unary_rpc_method_handler(call, *codec)
    if handler.stream_unary:
        call = _guard_unary(handler.stream_unary, method, problem)
        return grpc.stream_unary_rpc_method_handler(call, *codec)
    if handler.unary_stream:
        stream = _guard_stream(handler.unary_stream, method, problem)
        return grpc.unary_stream_rpc_method_handler(stream, *codec)
    stream = _guard_stream(handler.stream_stream, method, problem)
    return grpc.stream_stream_rpc_method_handler(stream, *codec)


def _guard_unary(inner: Any, method: str, problem: Unauthenticated | None) -> Any:
    async def call(request: Any, context: _Context) -> Any:
        async with _guarded(method, problem, context):
            return await inner(request, context)

    return call


def _guard_stream(inner: Any, method: str, problem: Unauthenticated | None) -> Any:
    async def call(request: Any, context: _Context) -> AsyncIterator[Any]:
        async with _guarded(method, problem, context), aclosing(inner(request, context)) as stream:
            async for response in stream:
                yield response

    return call


@asynccontextmanager
async def _guarded(
    method: str, problem: Unauthenticated | None, context: _Context
) -> AsyncIterator[None]:
    began = time.monotonic()
    # Asked now: of a call that was cancelled gRPC has freed the memory that holds the answer.
    peer = context.peer() if _log.isEnabledFor(logging.DEBUG) else ""
    outcome = "cancelled"
    try:
        if problem is not None:
            raise problem
        if method.startswith(_OURS) and not _has_deadline(context):
            raise DeadlineRequired(method)
        yield
        outcome = "ok"
    except RolloutServerError as error:
        outcome = reason_name(error)
        code, status = to_status(error)
        trailer = (("grpc-status-details-bin", status.SerializeToString()),)
        await context.abort(code, message_of(error), trailing_metadata=trailer)
    finally:
        took_ms = (time.monotonic() - began) * 1000
        _log.debug("%s %s %s %.1f ms", peer, method, outcome, took_ms)


def _has_deadline(context: _Context) -> bool:
    left_s = context.time_remaining()
    return left_s is not None and left_s < _NO_DEADLINE_S
