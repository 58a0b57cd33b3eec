"""A call that sends a stream, by gRPC's asyncio client, and that says why the server ended it.

Where a write fails since the server has ended the call, grpcio puts a status of its own in the
place of the server's (https://github.com/grpc/grpc/issues/36066): "Internal error from Core".
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
    """Does what the call does, and raises the server's status.

    Args:
        call: Of a `StreamUnaryMultiCallable` or a `StreamStreamMultiCallable`, just made.
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
        """The next answer, or `grpc.aio.EOF`."""
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
        if self._ended is None:  # It comes yet, and then takes the place of grpcio's.
            while await self._call.details() == _OF_GRPCIO:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(_LOOK_S)
            self._note(self._call)
        assert self._ended is not None
        raise self._ended

    def _note(self, call: Any) -> None:
        """Keeps the first status, before grpcio can put its own in its place."""
        if (details := _now(call.details())) != _OF_GRPCIO:
            self._ended = grpc.aio.AioRpcError(
                code=_now(call.code()),
                initial_metadata=_now(call.initial_metadata()),
                trailing_metadata=_now(call.trailing_metadata()),
                details=details,
            )


def _now(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise RuntimeError("the call has no status yet")
