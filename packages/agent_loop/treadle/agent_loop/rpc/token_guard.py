"""The check of a caller's token, before anything else of a call.

Invariant: of a call without the right token not even the message is read.
"""

import hmac
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in its stub only
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class TokenCheck:
    """Args: token: Required of callers; None admits everyone."""

    def __init__(self, token: str | None) -> None:
        self._expected = None if token is None else f"Bearer {token}".encode()

    def problem(self, details: grpc.HandlerCallDetails) -> str | None:
        """Returns what is wrong with a caller's token, for a message; None: it is right."""
        metadata = details.invocation_metadata or ()
        shown = [value for name, value in metadata if name == "authorization"]
        if self._expected is None:
            return None
        for value in shown:
            raw = value if isinstance(value, bytes) else value.encode()
            if not hmac.compare_digest(raw, self._expected):
                return "the call has a wrong token"
        return None if shown else "the call has no token"


class TokenGuard(grpc.aio.ServerInterceptor):
    """Serves callers with the token only."""

    def __init__(self, token: str) -> None:
        self._check = TokenCheck(token)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Returns the method's handler, or one that refuses."""
        problem = self._check.problem(handler_call_details)
        if problem is not None:
            return refusing(partial(_refuse, problem))
        return await continuation(handler_call_details)


class BlockingTokenGuard(grpc.ServerInterceptor):
    """The same for a server whose handlers run in threads."""

    def __init__(self, token: str) -> None:
        self._check = TokenCheck(token)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Handler | None"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Returns the method's handler, or one that refuses."""
        problem = self._check.problem(handler_call_details)
        if problem is None:
            return continuation(handler_call_details)

        def refuse(requests: object, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, problem)

        return grpc.stream_stream_rpc_method_handler(refuse)


def refusing(refuse: Callable[[Context], Awaitable[None]]) -> Handler:
    """Returns a handler that only calls `refuse`, which raises."""

    async def handle(requests: object, context: Context) -> None:
        await refuse(context)

    # On the wire all methods look alike. Of a stream gRPC reads nothing before the handler asks.
    return grpc.stream_stream_rpc_method_handler(handle)


async def _refuse(problem: str, context: Context) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, problem)
