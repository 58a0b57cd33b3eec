"""The rank's end of the contract: a gRPC server on a thread, which hands requests to the main one.

Invariants: requests are executed one at a time, in order, by the main thread, where torch is. Signs
of life come from the server's thread, while a request is executed. A shard of a batch is received
there too, so that the main thread waits for no byte that is here already.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, status_pb2
from grpc_status.rpc_status import to_status

from treadle.agent_loop.rpc.driven import DrivenProgram, serve_driver
from treadle.policy.client.methods import METHODS
from treadle.policy.client.signs_of_life import sign_of_life
from treadle.policy.v1 import errors_pb2
from treadle.policy.v1 import rank_service_pb2 as rank_pb
from treadle.policy.v1 import training_service_pb2 as pb

__all__ = ["Asked", "RankServer", "RequestFailed"]

ReceivedShard = tuple[pb.Shard, bytearray]


class RequestFailed(Exception):
    """A request failed; the driver gets the failure."""

    def __init__(self, failure: errors_pb2.RankFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and who waits for its answer: the response, or `RequestFailed`."""

    request: Message
    answer: "Future[Message]" = field(default_factory=Future)


class RankServer:
    """A context manager that serves until it is left; iterating over it gives the requests.

    Iteration ends when the driver is gone.
    """

    def __init__(self, program: DrivenProgram) -> None:
        """Serves nothing yet; the present thread is the one that executes requests."""
        self._program = program
        self._main = threading.get_ident()
        self._asked: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._batches: dict[int, Future[ReceivedShard]] = {}
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    def __enter__(self) -> Self:
        """Returns when the server serves.

        Raises:
            RuntimeError, OSError: It cannot.
        """
        self._thread.start()
        self._loop = self._started.result()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Sends the last answer, and ends."""
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join()

    def __iter__(self) -> Iterator[Asked]:
        return iter(self._asked.get, None)  # None ends it

    def take_batch(self, number: int) -> ReceivedShard:
        """Returns the shard of a batch, when it has come, and forgets it."""
        try:
            return self._batch(number).result()
        finally:
            del self._batches[number]

    def _batch(self, number: int) -> "Future[ReceivedShard]":
        return self._batches.setdefault(number, Future())

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self) -> None:
        self._ended, self._at_work = asyncio.Event(), asyncio.Event()
        async with serve_driver(self._program, self._add_services):
            self._started.set_result(asyncio.get_running_loop())
            await self._ended.wait()

    def _end(self) -> None:
        self._ended.set()
        self._at_work.set()

    def _add_services(self, server: grpc.aio.Server) -> None:
        of_service = attrgetter("service")
        usual: tuple[Callable[..., Any], Callable[..., Any]]
        usual = grpc.unary_unary_rpc_method_handler, self._ask
        others: dict[type[Any], tuple[Callable[..., Any], Callable[..., Any]]] = {
            rank_pb.WatchRequest: (grpc.unary_stream_rpc_method_handler, self._watch),
            pb.SendBatchRequest: (grpc.stream_unary_rpc_method_handler, self._receive),
        }
        for service, methods in groupby(sorted(METHODS.values(), key=of_service), of_service):
            handlers: dict[str, Any] = {}
            for method in methods:
                make, behaviour = others.get(method.request, usual)
                handlers[method.name] = make(
                    behaviour, method.request.FromString, method.response.SerializeToString
                )
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service, handlers),)
            )

    async def _ask(self, request: Message, context: Any) -> Message:
        asked = Asked(request)
        self._at_work.set()
        self._asked.put(asked)
        try:
            return await asyncio.wrap_future(asked.answer)
        except RequestFailed as failed:
            await context.abort_with_status(to_status(_status(failed.failure)))
            raise  # not reached
        finally:
            if not self._ended.is_set():
                self._at_work.clear()

    async def _watch(
        self, request: rank_pb.WatchRequest, context: Any
    ) -> AsyncIterator[rank_pb.WatchResponse]:
        sign = partial(sign_of_life, self._main)
        try:
            yield rank_pb.WatchResponse(**asdict(sign()))
            while await self._at_work.wait() and not self._ended.is_set():
                yield rank_pb.WatchResponse(**asdict(sign()))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), request.beat_s)
        finally:  # the driver is gone, or the rank ends
            self._asked.put(None)
            for batch in self._batches.values():
                batch.cancel()

    async def _receive(
        self, requests: AsyncIterator[pb.SendBatchRequest], context: Any
    ) -> pb.SendBatchResponse:
        shard = (await anext(aiter(requests))).shard
        memory, end = bytearray(shard.memory_bytes), 0
        view = memoryview(memory)  # which refuses what is too long
        async for request in requests:
            size = len(request.memory)
            view[end : end + size] = request.memory
            end += size
        if end != len(memory):
            told = f"a shard of {len(memory)} bytes ended after {end}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, told)
        self._batch(shard.batch).set_result((shard, memory))
        return pb.SendBatchResponse()


def _status(failure: errors_pb2.RankFailure) -> status_pb2.Status:
    detail = any_pb2.Any()
    detail.Pack(failure)
    code = code_pb2.INTERNAL
    if failure.kind == errors_pb2.FAILURE_KIND_INPUT:
        code = code_pb2.INVALID_ARGUMENT
    return status_pb2.Status(code=code, message=failure.message[:1000], details=[detail])
