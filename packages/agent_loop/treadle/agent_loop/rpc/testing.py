"""A rollout server that follows a script, over real gRPC, for the tests of the client.

Invariant: every Generate call uses the next handler of the script; a call beyond the script fails.
Requests, metadata and remaining times are recorded. The server made by
`ScriptedServer(fails(grpc.StatusCode.UNAVAILABLE, "PAUSED"), says(STARTED, ...))` refuses the first
call and answers the second one; `serving` yields its address, to which a test connects.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, ClassVar

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from treadle.agent_loop.rpc.errors import DETAILS_KEY, DOMAIN
from treadle.rollout.v1 import generation_service_pb2 as pb
from treadle.rollout.v1 import (
    generation_service_pb2_grpc,
    server_service_pb2,
    server_service_pb2_grpc,
)

Context = Any
Handler = Callable[[pb.GenerateRequest, Context], AsyncIterator[pb.GenerateResponse]]
_REGISTER: list[Any] = [
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server,
    server_service_pb2_grpc.add_ServerServiceServicer_to_server,
]
STARTED = pb.GenerateResponse(started=pb.GenerateStarted(cached_prompt_tokens=2))


def tokens(*ids: int, version: int = 1) -> pb.GenerateResponse:
    """Returns a chunk of these ids; the log-probability of id i is -i / 8."""
    logprobs = [-i / 8 for i in ids]
    return pb.GenerateResponse(
        tokens=pb.TokenChunk(token_ids=ids, logprobs=logprobs, weight_version=version)
    )


def prompt_logprobs(*values: float) -> pb.GenerateResponse:
    """Returns log-probabilities of ids of the prompt."""
    return pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(logprobs=values, weight_version=1))


def finished(count: int, reason: Any = pb.FINISH_REASON_STOP) -> pb.GenerateResponse:
    """Returns the end of a stream of `count` tokens."""
    return pb.GenerateResponse(finished=pb.GenerateFinished(reason=reason, num_tokens=count))


def says(*events: pb.GenerateResponse) -> Handler:
    """Returns a handler that streams these events and ends normally."""

    async def handle(
        request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        for event in events:
            yield event

    return handle


def fails(
    code: grpc.StatusCode,
    reason: str | None,
    *events: pb.GenerateResponse,
    retry_after_s: float | None = None,
) -> Handler:
    """Returns a handler that streams these events and then fails."""

    async def handle(
        request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        for event in events:
            yield event
        status = status_pb2.Status(code=code.value[0], message="scripted")
        details: list[Any] = []
        if reason is not None:
            details.append(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))
        if retry_after_s is not None:
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(int(retry_after_s * 1e9))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        for detail in details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        await context.abort_with_status(rpc_status.to_status(status))

    return handle


class _Aborted(Exception):
    """A handler ended one of many completions with a status."""


class _PartContext:
    """The context of a handler that serves one of many completions."""

    def __init__(self, begun: pb.NumberedRequest, metadata: Any) -> None:
        self._begun = begun
        self._metadata = metadata
        self.traceparent = begun.traceparent

    def invocation_metadata(self) -> Any:
        return self._metadata

    def time_remaining(self) -> float:
        return self._begun.timeout.ToNanoseconds() / 1e9

    async def abort_with_status(self, status: Any) -> None:
        raise _Aborted(status)


class ScriptedServer(
    generation_service_pb2_grpc.GenerationServiceServicer,
    server_service_pb2_grpc.ServerServiceServicer,
):
    """Answers each Generate call with the next handler.

    Args:
        images: Whether it reports the capability `images`.

    Class attributes:
        many: Whether servers report the capability `generate_many`.

    Attributes:
        handlers: The rest of the script.
        requests: The request of each call.
        metadata: The metadata of each call.
        time_left: The remaining seconds of each call; None without a deadline.
        address: host:port, once it is served.
        num_shared: Number of shared calls so far.
    """

    many: ClassVar[bool] = False

    def __init__(self, *handlers: Handler, images: bool = False) -> None:
        self.handlers = list(handlers)
        self._images = images
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.time_left: list[float | None] = []
        self.address = ""
        self.num_shared = 0

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Runs the next handler."""
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.time_left.append(context.time_remaining())
        assert self.handlers, "no handler left"
        async for event in self.handlers.pop(0)(request, context):
            yield event

    async def GenerateMany(self, requests: Any, context: Context) -> None:
        """Runs the next handler for each completion, all of them at once."""
        self.num_shared += 1
        running: dict[int, asyncio.Task[None]] = {}
        writing = asyncio.Lock()  # gRPC writes one message at a time

        async def send(number: int, **fields: Any) -> None:
            part = pb.NumberedResponse(number=number, **fields)
            async with writing:
                await context.write(pb.GenerateManyResponse(parts=[part]))

        async def run(begun: pb.NumberedRequest) -> None:
            part = _PartContext(begun, context.invocation_metadata())
            try:
                async with aclosing(self.Generate(begun.request, part)) as events:
                    async for event in events:
                        await send(begun.number, response=event)
            except _Aborted as aborted:
                (status,) = aborted.args
                details = dict(status.trailing_metadata)[DETAILS_KEY]
                ended = pb.CompletionStatus(
                    code=status.code.value[0], message=status.details, details=details
                )
            else:
                ended = pb.CompletionStatus()
            await send(begun.number, status=ended)

        try:
            async for message in requests:
                for begun in message.begin:
                    running[begun.number] = asyncio.create_task(run(begun))
                for number in message.cancel:
                    running[number].cancel()
        finally:
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        """Reports a vocabulary of 100 ids and a context of 64 tokens."""
        return server_service_pb2.GetServerInfoResponse(
            engine="scripted",
            capabilities=server_service_pb2.Capabilities(
                constrained_sampling=True,
                sampled_logprobs=True,
                images=self._images,
                prompt_logprobs=True,
                generate_many=self.many,
            ),
            model=server_service_pb2.ModelInfo(
                architecture="Test", vocab_size=100, context_length=64, tokenizer_sha256=b"\x01"
            ),
        )


@asynccontextmanager
async def serving(*servers: ScriptedServer) -> AsyncIterator[list[str]]:
    """Serves the servers on free loopback ports; yields their addresses."""
    async with AsyncExitStack() as stack:
        for scripted in servers:
            server = grpc.aio.server()
            for register in _REGISTER:
                register(scripted, server)
            port = server.add_insecure_port("127.0.0.1:0")
            scripted.address = f"127.0.0.1:{port}"
            await server.start()
            stack.push_async_callback(server.stop, None)
        yield [server.address for server in servers]
