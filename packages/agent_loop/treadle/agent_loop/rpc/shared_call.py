"""The shared call: many completions of one server over one GenerateMany call.

gRPC's cost is per call, and many times that of a message. So completions begin, arrive and end as
parts of messages, and those that are ready together share one.

Invariants:

1. A completion behaves as its own call of Generate would: its messages arrive in order; it ends
   normally, or with the `AioRpcError` of its status; leaving it early cancels it at the server.
2. It ends at its deadline, even if the server sends nothing.
3. When the call ends, every completion that has no status fails as the call did, after the
   messages that arrived. A shared call that has ended is not used again.

The caller of a completion waits in `async for`. One task writes what is to be begun or cancelled,
and waits while the server does not read; one reads. Both end with the call, which `aclose` ends.
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Protocol, Self

import grpc
import grpc.aio
from google.protobuf import duration_pb2

from treadle.agent_loop.rpc.errors import DETAILS_KEY
from treadle.rollout.v1 import generation_service_pb2 as pb

DEADLINE_S = 300 * 24 * 3600.0
"""Deadline of the call. It is far off, because each completion has one. A year or more counts as
none."""
MAX_REQUEST_BYTES = 1 << 20
"""Maximum size of a request; a message has at most 4 MiB."""

_MAX_BEGUN = 256
"""Completions that one message begins."""
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class ManyCall(Protocol):
    """The call: messages to write, and messages to read."""

    async def write(self, request: pb.GenerateManyRequest) -> None:
        """Sends a message; waits while the server does not read."""
        ...

    def __aiter__(self) -> AsyncIterator[pb.GenerateManyResponse]:
        """Iterates over the server's messages."""
        ...

    def cancel(self) -> bool:
        """Ends the call."""
        ...


class SharedCall:
    """Completions over one call, until it ends.

    Args:
        call: Just begun; the object becomes its owner.
    """

    def __init__(self, call: ManyCall) -> None:
        self._call = call
        self._open: dict[int, SharedCompletion] = {}
        self._num_begun = 0
        self._begin: deque[pb.NumberedRequest] = deque()
        self._cancel: list[int] = []
        self._changed = asyncio.Event()
        nobody = contextvars.Context()  # not that of the completion which happens to be the first
        self._tasks = {
            asyncio.create_task(self._write(), name="write GenerateMany", context=nobody),
            asyncio.create_task(self._read(), name="read GenerateMany", context=nobody),
        }
        self.ended = False

    def generate(
        self, request: pb.GenerateRequest, *, timeout_s: float, traceparent: str = ""
    ) -> "SharedCompletion":
        """Begins a completion, whose reader must end it (`completion_stream.read`).

        Args:
            request: Bytes, at most `MAX_REQUEST_BYTES` of them.
            traceparent: The caller's span; empty: none.
        """
        self._num_begun += 1
        completion = SharedCompletion(self, self._num_begun, timeout_s)
        self._open[completion.number] = completion
        timeout = duration_pb2.Duration()
        timeout.FromNanoseconds(max(0, int(timeout_s * 1e9)))
        self._begin.append(
            pb.NumberedRequest(
                number=completion.number,
                request=request,
                timeout=timeout,
                traceparent=traceparent,
            )
        )
        self._changed.set()
        return completion

    def leave(self, number: int) -> None:
        """Cancels a completion at the server, unless it has ended."""
        if self._open.pop(number, None) is not None:
            self._cancel.append(number)
            self._changed.set()

    async def aclose(self) -> None:
        """Ends the call, and fails what has not ended."""
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail(_unavailable("the client closed its connection"))

    async def _write(self) -> None:
        while not self.ended:
            await self._changed.wait()
            self._changed.clear()
            while not self.ended and (self._begin or self._cancel):
                try:
                    await self._call.write(self._next_message())
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # the call has ended, and the reader knows how

    def _next_message(self) -> pb.GenerateManyRequest:
        message = pb.GenerateManyRequest()
        size = 0
        while self._begin and len(message.begin) < _MAX_BEGUN:
            size += self._begin[0].ByteSize()
            if message.begin and size > MAX_REQUEST_BYTES:
                break
            message.begin.append(self._begin.popleft())
        if not self._begin:  # what is cancelled has begun
            message.cancel.extend(self._cancel)
            self._cancel.clear()
        return message

    async def _read(self) -> None:
        failure = _unavailable("the server ended the call")
        try:
            async for message in self._call:
                for part in message.parts:
                    self._take(part)
        except grpc.aio.AioRpcError as failed:
            failure = failed
            if failed.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # of the call, not of theirs
                failure = _unavailable("the call has lasted too long")
        except asyncio.CancelledError:
            failure = _unavailable("the call was cancelled")
            raise
        finally:
            self._fail(failure)

    def _take(self, part: pb.NumberedResponse) -> None:
        completion = self._open.get(part.number)
        if completion is None:  # it was left
            return
        if part.HasField("response"):
            completion.arrived(part.response)
        if part.HasField("status"):
            del self._open[part.number]
            completion.end(_error_of(part.status))

    def _fail(self, failure: grpc.aio.AioRpcError) -> None:
        self.ended = True
        self._changed.set()  # the writer ends
        for completion in self._open.values():
            completion.end(failure)
        self._open.clear()


class SharedCompletion:
    """One completion of a shared call; reads as a call of Generate does."""

    __slots__ = ("_ended", "_error", "_events", "_shared", "_timer", "_waiter", "number")

    def __init__(self, shared: SharedCall, number: int, timeout_s: float) -> None:
        self.number = number
        self._shared = shared
        self._events: deque[pb.GenerateResponse] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._error: grpc.aio.AioRpcError | None = None
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)

    def arrived(self, event: pb.GenerateResponse) -> None:
        """Takes a message."""
        self._events.append(event)
        self._wake()

    def end(self, error: grpc.aio.AioRpcError | None) -> None:
        """Ends it, after the messages that have arrived; None: normally."""
        self._ended, self._error = True, error
        self._timer.cancel()
        self._wake()

    def cancel(self) -> bool:
        """Ends it, if it has not ended: the server stops sampling."""
        if self._ended:
            return False
        self._shared.leave(self.number)
        self.end(_error(grpc.StatusCode.CANCELLED, "Locally cancelled"))
        return True

    def __aiter__(self) -> Self:
        """Iterates over its messages."""
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        """Returns the next message.

        Raises:
            AioRpcError: It failed.
        """
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._events.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _expire(self) -> None:
        self._shared.leave(self.number)
        self.end(_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))


def _error_of(status: pb.CompletionStatus) -> grpc.aio.AioRpcError | None:
    """Returns what a call with this status would raise; None for OK."""
    if not status.code:
        return None
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return _error(code, status.message, status.details)


def _unavailable(text: str) -> grpc.aio.AioRpcError:
    return _error(grpc.StatusCode.UNAVAILABLE, text)


def _error(code: grpc.StatusCode, text: str, details: bytes = b"") -> grpc.aio.AioRpcError:
    trailer: Any = grpc.aio.Metadata((DETAILS_KEY, details)) if details else grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailer, details=text)
