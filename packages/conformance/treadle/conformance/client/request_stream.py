"""A streaming call of gRPC's asyncio client that keeps the server's status.

If a write fails because the server has ended the call, grpcio replaces the server's status with
"Internal error from Core" (https://github.com/grpc/grpc/issues/36066).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Generator
from typing import Any, TypeVar

import grpc
import grpc.aio

__all__ = ["RequestStream"]

T = TypeVar("T")

_OF_GRPCIO = "Internal error from Core"
_LOOK_S = 0.001


class RequestStream:
    """Wraps a call and raises the server's status.

    Args:
        call: A new call of a `StreamUnaryMultiCallable` or a `StreamStreamMultiCallable`.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._ended: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._told(self._call).__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        answers = aiter(self._call)
        while (answer := await self._told(anext(answers, grpc.aio.EOF))) is not grpc.aio.EOF:
            yield answer

    async def read(self) -> Any:
        """Returns the next answer, or `grpc.aio.EOF`."""
        return await self._told(self._call.read())

    async def write(self, request: Any) -> None:
        """Sends one message."""
        await self._told(self._call.write(request))

    async def _told(self, doing: Awaitable[T]) -> T:
        try:
            return await doing
        except grpc.aio.AioRpcError as error:
            if error.details() != _OF_GRPCIO:
                raise
        if self._ended is None:  # The server's status is still to come and replaces grpcio's.
            while await self._call.details() == _OF_GRPCIO:  # noqa: ASYNC110 - no event to wait for
                await asyncio.sleep(_LOOK_S)
            self._note(self._call)
        assert self._ended is not None
        raise self._ended

    def _note(self, call: Any) -> None:
        """Keeps the first status before grpcio can replace it."""
        if (details := _now(call.details())) != _OF_GRPCIO:
            self._ended = grpc.aio.AioRpcError(
                code=_now(call.code()),
                initial_metadata=_now(call.initial_metadata()),
                trailing_metadata=_now(call.trailing_metadata()),
                details=details,
            )


def _now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise RuntimeError("the call has no status yet")
