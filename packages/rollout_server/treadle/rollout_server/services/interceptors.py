"""The guard: checks every call before its handler, and encodes its errors afterwards.

Invariant: a handler of our services runs only for a caller with the right token and a
deadline, and every `RolloutServerError` it raises leaves as a status with details. Reflection
needs the token only, and health not even that, so that a probe without credentials works.

Any other exception is a bug: it is logged with its trace and leaves as INTERNAL without details.
Cancellation passes through untouched.
"""

import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeAlias

import grpc
import grpc.aio

from treadle.rollout_server.errors import (
    DeadlineRequired,
    RolloutServerError,
    Unauthenticated,
)
from treadle.rollout_server.observability.logs import name_call
from treadle.rollout_server.services.errors import message_of, reason_name, to_status

_log = logging.getLogger(__name__)
_OURS = "/treadle.rollout."
_OPEN = "/grpc.health.v1.Health/"
# For a call without a deadline, time_remaining() returns years.
_NO_DEADLINE_S = 365 * 24 * 3600.0

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in its stub only
_MaybeHandler: TypeAlias = "_Handler | None"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Guard(grpc.aio.ServerInterceptor):
    """Checks token and deadline, encodes errors, logs calls.

    Args:
        token: Bearer token that callers must send; None admits every caller.
    """

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token.encode()
        self._admitting: dict[str, _Handler] = {}

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
        problem = self._problem(handler_call_details)
        if problem is not None:
            return _wrapped(handler, method, problem)
        if method not in self._admitting:
            self._admitting[method] = _wrapped(handler, method, None)
        return self._admitting[method]

    def _problem(self, details: grpc.HandlerCallDetails) -> Unauthenticated | None:
        if self._token is None:
            return None
        shown = dict(details.invocation_metadata or ()).get("authorization")
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
        name_call(request)
        async with _Guarded(method, problem, context):
            return await inner(request, context)

    return call


def _guard_stream(inner: Any, method: str, problem: Unauthenticated | None) -> Any:
    async def call(request: Any, context: _Context) -> AsyncIterator[Any]:
        name_call(request)
        async with _Guarded(method, problem, context), aclosing(inner(request, context)) as stream:
            async for response in stream:
                yield response

    return call


class _Guarded:
    """Surrounds one call. A class: generators as context managers cost three times as much."""

    __slots__ = ("_began", "_context", "_method", "_peer", "_problem")

    def __init__(self, method: str, problem: Unauthenticated | None, context: _Context) -> None:
        self._method = method
        self._problem = problem
        self._context = context

    async def __aenter__(self) -> None:
        self._began = time.monotonic()
        # Read now: gRPC frees the peer of a call that is cancelled.
        self._peer = self._context.peer() if _log.isEnabledFor(logging.DEBUG) else ""
        error: RolloutServerError | None = self._problem
        if error is None and self._method.startswith(_OURS) and not _has_deadline(self._context):
            error = DeadlineRequired(self._method)
        if error is not None:
            await self._refuse(error)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, RolloutServerError):
            await self._refuse(error)
        # gRPC handles its own errors: an abort, or a write to a caller that has gone.
        if isinstance(error, Exception) and not isinstance(error, grpc.aio.BaseError):
            self._note("bug")
            _log.error("a bug in %s", self._method, exc_info=error)
            text = f"{type(error).__name__}: a bug of the server, whose log has the trace"
            await self._context.abort(grpc.StatusCode.INTERNAL, text)
        self._note("ok" if error is None else "cancelled")

    async def _refuse(self, error: RolloutServerError) -> None:
        self._note(reason_name(error))
        code, status = to_status(error)
        trailer = (("grpc-status-details-bin", status.SerializeToString()),)
        await self._context.abort(code, message_of(error), trailing_metadata=trailer)

    def _note(self, outcome: str) -> None:
        if self._peer:
            took_ms = (time.monotonic() - self._began) * 1000
            _log.debug("%s %s %s %.1f ms", self._peer, self._method, outcome, took_ms)


def _has_deadline(context: _Context) -> bool:
    left_s = context.time_remaining()
    return left_s is not None and left_s < _NO_DEADLINE_S
