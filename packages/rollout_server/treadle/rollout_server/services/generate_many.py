"""GenerateMany: many completions over one call, each as a call of Generate.

Invariants:

1. A completion that has begun ends with its own status, after its sequence has left the engine. A
   completion that its caller cancelled, or whose caller is gone, has no status.
2. However the call ends, all of its sequences have left the engine when the handler returns.
3. The output that the caller has not read is bounded: a completion waits until its last message has
   been written before it adds another.
4. A server that stops reads no more of the call, and ends it when the completions it has begun have
   ended. So a caller that keeps a call open does not delay a shutdown.

Each completion is a task. The handler reads; one task writes what is ready, all of it in one
message of at most `_MESSAGE_BYTES`, unless a single part is larger.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from treadle.rollout.v1 import generation_service_pb2 as pb
from treadle.rollout_server.errors import DeadlineRequired, InvalidField, RolloutServerError
from treadle.rollout_server.observability.logs import name_call
from treadle.rollout_server.scheduling.lifecycle import Lifecycle, ServerState
from treadle.rollout_server.services.errors import message_of, to_status
from treadle.rollout_server.services.generation import GenerationServicer
from treadle.rollout_server.services.interceptors import is_deadline
from treadle.rollout_server.services.methods import Methods
from treadle.tracing import TRACE_HEADER

_log = logging.getLogger(__name__)
_SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
_METHOD = "GenerateMany"
_MESSAGE_BYTES = 1 << 20
"""Far below gRPC's 4 MiB, which the largest part fits."""


class GenerateManyServicer:
    """Serves the completions of `GenerationServicer`, many at a time."""

    def __init__(self, servicer: GenerationServicer, lifecycle: Lifecycle) -> None:
        self._servicer = servicer
        self._reading: set[asyncio.Task[None]] = set()
        self._stopping = False
        lifecycle.observe(self._entered)

    async def generate_many(
        self,
        requests: AsyncIterator[pb.GenerateManyRequest],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> None:
        """Serves the completions of one call."""
        calls = _Completions(self._servicer, context.write)
        reading = asyncio.create_task(calls.read(requests), name=f"read {_METHOD}")
        self._reading.add(reading)
        if self._stopping:
            reading.cancel()
        try:
            await calls.serve(reading)
        finally:
            self._reading.discard(reading)

    def _entered(self, state: ServerState) -> None:
        if state is ServerState.STOPPING:
            self._stopping = True
            for reading in self._reading:
                reading.cancel()


class _Completions:
    """The completions of one call."""

    def __init__(
        self,
        servicer: GenerationServicer,
        write: Callable[[pb.GenerateManyResponse], Awaitable[None]],
    ) -> None:
        self._servicer = servicer
        self._running: dict[int, _Completion] = {}
        self._outbox = _Outbox(write)

    async def read(self, requests: AsyncIterator[pb.GenerateManyRequest]) -> None:
        """Begins and cancels completions until the caller has closed its side.

        Raises:
            InvalidField: A number is in use.
        """
        async for message in requests:
            for wanted in message.begin:
                if wanted.number in self._running:
                    free = "a number that no running completion has"
                    raise InvalidField("begin.number", str(wanted.number), free)
                self._running[wanted.number] = _Completion(wanted, self._servicer, self._outbox)
                self._running[wanted.number].begin(self._ended)
            for number in message.cancel:
                if (completion := self._running.get(number)) is not None:
                    completion.cancel()

    async def serve(self, reading: asyncio.Task[None]) -> None:
        """Waits until all has been read, has ended and was written."""
        writing = asyncio.create_task(self._outbox.write_all(), name=f"write {_METHOD}")
        # Without its writer nothing ends: what could say so waits for it.
        writing.add_done_callback(lambda _: self._cancel(reading))
        try:
            await asyncio.wait({reading})
            if not reading.cancelled():
                reading.result()
            if tasks := self._tasks():
                await asyncio.wait(tasks)
            self._outbox.close()
            await writing
        finally:
            tasks = self._tasks()
            self._cancel(reading, writing)
            await asyncio.gather(reading, writing, *tasks, return_exceptions=True)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [completion.task for completion in self._running.values()]

    def _cancel(self, *others: asyncio.Task[None]) -> None:
        for task in (*others, *self._tasks()):
            task.cancel()

    def _ended(self, number: int) -> None:
        del self._running[number]


class _Completion:
    """One of many completions, and what it needs of a call (`generation.Caller`)."""

    __slots__ = ("_expired", "_outbox", "_servicer", "_timer", "_wanted", "task")

    task: asyncio.Task[None]

    def __init__(
        self, wanted: pb.NumberedRequest, servicer: GenerationServicer, outbox: "_Outbox"
    ) -> None:
        self._wanted = wanted
        self._servicer = servicer
        self._outbox = outbox
        self._expired = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, on_end: Callable[[int], None]) -> None:
        """Starts its task; `on_end` is called with its number at the end."""
        number = self._wanted.number
        self.task = asyncio.create_task(self._run(), name=f"completion {number}")
        self.task.add_done_callback(lambda _: on_end(number))

    def cancel(self) -> None:
        """Cancels it, because its caller does not want it any more."""
        self.task.cancel()

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Returns the metadata that a separate call would have."""
        parent = self._wanted.traceparent
        return ((TRACE_HEADER, parent),) if parent else ()

    async def write(self, message: bytes, /) -> None:
        """Sends a message, when those before it have been written."""
        await self._outbox.put(_Part(self._wanted.number, message))

    async def _run(self) -> None:
        name_call(self._wanted.request)
        try:
            status, last = pb.CompletionStatus(), await self._generated()
        except asyncio.CancelledError:
            if not self._expired:
                raise
            status, last = _expired(), b""
        except grpc.aio.BaseError:  # the caller is gone
            return
        except Exception as error:
            status, last = _failed(error), b""
        finally:
            if self._timer is not None:
                self._timer.cancel()
        self._outbox.post(_Part(self._wanted.number, last, status))

    async def _generated(self) -> bytes:
        """Returns the last message.

        Raises:
            RolloutServerError: As `GenerationServicer.generate`; or there is no deadline.
        """
        timeout_s = self._wanted.timeout.ToNanoseconds() / 1e9
        if not self._wanted.HasField("timeout") or not is_deadline(timeout_s):
            raise DeadlineRequired(_METHOD)
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)
        return await self._servicer.generate(self._wanted.request, self)

    def _expire(self) -> None:
        self._expired = True
        self.task.cancel()


@dataclass(slots=True)
class _Part:
    """A part of a completion that is to be sent.

    Attributes:
        message: A serialized `GenerateResponse`; empty: none.
        status: How it ended; None before the end.
        written: Done when it has been written; None if nobody waits for that.
    """

    number: int
    message: bytes
    status: pb.CompletionStatus | None = None
    written: asyncio.Future[None] | None = None


class _Outbox:
    """Messages to be written: one owner writes, and those that are ready meanwhile go together."""

    def __init__(self, write: Callable[[pb.GenerateManyResponse], Awaitable[None]]) -> None:
        self._write = write
        self._parts: deque[_Part] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    def post(self, part: _Part) -> None:
        """Sends the last part of a completion."""
        self._parts.append(part)
        self._changed.set()

    async def put(self, part: _Part) -> None:
        """Sends a part, and waits until it has been written."""
        part.written = asyncio.get_running_loop().create_future()
        self.post(part)
        await part.written

    def close(self) -> None:
        """Lets `write_all` end when everything has been written."""
        self._closed = True
        self._changed.set()

    async def write_all(self) -> None:
        """Writes until it is closed."""
        while not self._closed:
            await self._changed.wait()
            self._changed.clear()
            while self._parts:
                parts = self._next_parts()
                await self._write(_message_of(parts))
                for part in parts:
                    if part.written is not None and not part.written.done():
                        part.written.set_result(None)

    def _next_parts(self) -> list[_Part]:
        """Takes what fits one message, at least one part."""
        taken = [self._parts.popleft()]
        size = len(taken[0].message)
        while self._parts and (size := size + len(self._parts[0].message)) <= _MESSAGE_BYTES:
            taken.append(self._parts.popleft())
        return taken


def _message_of(parts: Sequence[_Part]) -> pb.GenerateManyResponse:
    message = pb.GenerateManyResponse()
    for part in parts:
        added = message.parts.add()
        added.number = part.number
        if part.message:
            added.response.MergeFromString(part.message)
        if part.status is not None:
            added.status.CopyFrom(part.status)
    return message


def _expired() -> pb.CompletionStatus:
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    return pb.CompletionStatus(code=code.value[0], message="Deadline Exceeded")


def _failed(error: Exception) -> pb.CompletionStatus:
    """Returns the status that the guard would give a separate call."""
    if isinstance(error, RolloutServerError):
        code, status = to_status(error)
        return pb.CompletionStatus(
            code=code.value[0], message=message_of(error), details=status.SerializeToString()
        )
    _log.error("a bug in %s", _METHOD, exc_info=error)
    text = f"{type(error).__name__}: a bug of the server, whose log has the trace"
    return pb.CompletionStatus(code=grpc.StatusCode.INTERNAL.value[0], message=text)


def add_to_server(servicer: GenerateManyServicer, server: Methods) -> None:
    """Serves GenerateMany."""
    many: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
        servicer.generate_many,
        request_deserializer=pb.GenerateManyRequest.FromString,
        response_serializer=pb.GenerateManyResponse.SerializeToString,
    )
    server.add_registered_method_handlers(_SERVICE, {_METHOD: many})
