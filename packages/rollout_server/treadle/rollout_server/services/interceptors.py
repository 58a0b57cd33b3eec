"""The guard: checks every call before its handler, and encodes its errors afterwards.

Invariant: a handler of our services runs only for a caller with the right token and a
deadline, and every `RolloutServerError` it raises leaves as a status with details. Reflection
needs the token only, and health not even that, so that a probe without credentials works.

Nothing is decoded before these checks, because decoding takes many times the memory of the
message: gRPC gets no deserializer and passes the bytes on, which are decoded here. To refuse a
caller without the token, not even the message is read. A message that does not parse, or is
beyond the bounds of its method (`message_limits`), is an error of the caller like any other.

Any other exception is a bug: it is logged with its trace and leaves as INTERNAL without details.
Cancellation passes through untouched.
"""

import hmac
import inspect
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from treadle.rollout_server.errors import (
    DeadlineRequired,
    InvalidField,
    RolloutServerError,
    Unauthenticated,
)
from treadle.rollout_server.observability.logs import name_call
from treadle.rollout_server.services.errors import message_of, reason_name, to_status
from treadle.rollout_server.services.message_limits import check_bytes

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
        if handler is None:
            return None
        problem = None if method.startswith(_OPEN) else self._problem(handler_call_details)
        if problem is not None:
            return _refusing(method, problem)
        if method not in self._admitting:
            self._admitting[method] = _wrapped(handler, method)
        return self._admitting[method]

    def _problem(self, details: grpc.HandlerCallDetails) -> Unauthenticated | None:
        if self._token is None:
            return None
        metadata = details.invocation_metadata or ()
        shown = [value for name, value in metadata if name == "authorization"]
        if not shown:
            return Unauthenticated("the call carries no token")
        for value in shown:
            raw = value if isinstance(value, bytes) else value.encode()
            if not hmac.compare_digest(raw, b"Bearer " + self._token):
                return Unauthenticated("the call carries a wrong token")
        return None


def _refusing(method: str, problem: Unauthenticated) -> _Handler:
    async def refuse(requests: object, context: _Context) -> None:
        async with _Guarded(method, problem, context):
            raise AssertionError("a refused call ends where it is entered")

    # On the wire all methods look alike. Of a stream gRPC reads nothing before the handler asks.
    return grpc.stream_stream_rpc_method_handler(refuse)


def _wrapped(handler: _Handler, method: str) -> _Handler:
    decoder = _Decoder(method, handler.request_deserializer)
    encode = handler.response_serializer
    if handler.unary_unary:
        call = _guard_unary(handler.unary_unary, method, decoder.message)
        return grpc.unary_unary_rpc_method_handler(call, None, encode)
    if handler.stream_unary:
        call = _guard_unary(handler.stream_unary, method, decoder.messages)
        return grpc.stream_unary_rpc_method_handler(call, None, encode)
    if handler.unary_stream:
        stream = _guard_stream(handler.unary_stream, method, decoder.message)
        return grpc.unary_stream_rpc_method_handler(stream, None, encode)
    stream = _guard_stream(handler.stream_stream, method, decoder.messages)
    return grpc.stream_stream_rpc_method_handler(stream, None, encode)


def _guard_unary(inner: Any, method: str, decode: Callable[[Any], Any]) -> Any:
    async def call(raw: Any, context: _Context) -> Any:
        async with _Guarded(method, None, context):
            request = decode(raw)
            name_call(request)
            return await inner(request, context)

    return call


def _guard_stream(inner: Any, method: str, decode: Callable[[Any], Any]) -> Any:
    async def write(raw: Any, context: _Context) -> None:
        async with _Guarded(method, None, context):
            request = decode(raw)
            name_call(request)
            await inner(request, context)

    async def call(raw: Any, context: _Context) -> AsyncIterator[Any]:
        async with _Guarded(method, None, context):
            request = decode(raw)
            name_call(request)
            async with aclosing(inner(request, context)) as stream:
                async for response in stream:
                    yield response

    # gRPC knows two kinds of handlers: those that write to the context, as health does, and those
    # that yield.
    return write if inspect.iscoroutinefunction(inner) else call


class _Decoder:
    """Decodes the requests of one method; raises `InvalidField` for bytes that are none."""

    __slots__ = ("_decode", "_method")

    def __init__(self, method: str, decode: Callable[[bytes], Any] | None) -> None:
        self._method = method
        self._decode = decode

    def message(self, raw: bytes) -> Any:
        """Returns a message."""
        if self._decode is None:
            return raw
        check_bytes(self._method, raw)
        try:
            return self._decode(raw)
        except DecodeError:
            received = f"{len(raw)} bytes that do not parse"
            expected = f"the serialized request message of {self._method}"
            raise InvalidField("request", received, expected) from None

    def messages(self, raw: AsyncIterable[bytes]) -> "_DecodedMessages":
        """Returns the messages of a stream, each decoded when the iterator advances."""
        return _DecodedMessages(aiter(raw), self.message)


class _DecodedMessages:
    """A stream of requests. A class: a generator in the middle would have to be closed."""

    __slots__ = ("_decode", "_raw")

    def __init__(self, raw: AsyncIterator[bytes], decode: Callable[[bytes], Any]) -> None:
        self._raw = raw
        self._decode = decode

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return self._decode(await anext(self._raw))


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
        if (
            error is None
            and self._method.startswith(_OURS)
            and not is_deadline(self._context.time_remaining())
        ):
            error = DeadlineRequired(self._method)
        refusal = None if error is None else self._refusal(error)
        if refusal is not None:
            await refusal.send(self._context)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        refusal = self._refusal(error)
        # The frame of this call outlives it: see `_Refusal.send`.
        del error, trace
        if refusal is not None:
            await refusal.send(self._context)

    def _refusal(self, error: BaseException | None) -> "_Refusal | None":
        """Notes how the call ended; returns the refusal for its caller, if it failed here."""
        if isinstance(error, RolloutServerError):
            self._note(reason_name(error))
            code, status = to_status(error)
            trailer = (("grpc-status-details-bin", status.SerializeToString()),)
            return _Refusal(code, message_of(error), trailer)
        unimplemented = grpc.StatusCode.UNIMPLEMENTED
        if isinstance(error, NotImplementedError) and self._context.code() is unimplemented:
            # Generated code says so of a method that is in the .proto and not in the servicer.
            self._note("unimplemented")
            return _Refusal(unimplemented, f"this server does not implement {self._method}")
        # gRPC handles its own errors: an abort, or a write to a caller that has gone.
        if isinstance(error, Exception) and not isinstance(error, grpc.aio.BaseError):
            self._note("bug")
            _log.error("a bug in %s", self._method, exc_info=error)
            text = f"{type(error).__name__}: a bug of the server, whose log has the trace"
            return _Refusal(grpc.StatusCode.INTERNAL, text)
        self._note("ok" if error is None else "cancelled")
        return None

    def _note(self, outcome: str) -> None:
        if self._peer:
            took_ms = (time.monotonic() - self._began) * 1000
            _log.debug("%s %s %s %.1f ms", self._peer, self._method, outcome, took_ms)


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The status of a call that failed."""

    code: grpc.StatusCode
    text: str
    trailer: tuple[tuple[str, bytes], ...] = ()

    async def send(self, context: _Context) -> None:
        """Ends the call, by raising.

        gRPC keeps what is raised here in the call's state, to which the frames that it goes
        through refer: a cycle. So neither the exception nor those frames may refer to the error of
        the call, whose own frames hold what the call used, such as the descriptor of a sender's
        memory. That would stay until Python's collector comes.
        """
        try:
            await context.abort(self.code, self.text, trailing_metadata=self.trailer)
        except grpc.aio.AbortError as aborted:
            aborted.__context__ = None
            raise


def is_deadline(left_s: float | None) -> bool:
    """Returns whether the remaining seconds are those of a deadline."""
    return left_s is not None and left_s < _NO_DEADLINE_S
