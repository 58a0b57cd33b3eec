"""The null server: a process behind the contract that knows its completions before it is asked.

Every session calls a tool in each of its turns, and answers in the last. A completion is one
message, which leaves with the status; of `GenerateMany`, those that came together share one. The
event loop is uvloop's, as in our servers. Nothing is checked, queued or logged, so that what calls
it can be measured::

    async with null_server(script) as server: ...
"""

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import grpc.aio
import uvloop

from treadle.rollout.v1 import generation_service_pb2 as generation_pb2
from treadle.rollout.v1 import server_service_pb2 as server_pb2

_GENERATION = "treadle.rollout.v1.GenerationService"
_SERVER = "treadle.rollout.v1.ServerService"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The tokens of every session.

    Attributes:
        call: Ids of a turn that calls the tool.
        last: Ids of the last turn.
        turns: Number of turns.
    """

    call: tuple[int, ...]
    last: tuple[int, ...]
    turns: int

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens of a session."""
        return (self.turns - 1) * len(self.call) + len(self.last)


class Sessions:
    """Where each session is in the script.

    Args:
        script: Of all sessions.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._calls: Counter[str] = Counter()

    def next_ids(self, session_id: str) -> tuple[int, ...]:
        """Returns the session's next completion."""
        self._calls[session_id] += 1
        if self._calls[session_id] < self._script.turns:
            return self._script.call
        del self._calls[session_id]
        return self._script.last


class NullServer:
    """Replies at once; holds the first requests until `gate` of them are there.

    Args:
        script: Of all sessions.
        gate: Number of requests to wait for.
    """

    def __init__(self, script: Script, gate: int) -> None:
        self._sessions = Sessions(script)
        self._replies = {ids: _reply(ids) for ids in (script.call, script.last)}
        self._missing, self._open = gate, asyncio.Event()

    async def generate(self, request: generation_pb2.GenerateRequest, context: Any) -> bytes:
        """Returns the session's next completion."""
        await self._pass(1)
        reply = self._replies[self._sessions.next_ids(request.session_id)]
        return reply.SerializeToString()

    async def generate_many(self, requests: Any, context: Any) -> None:
        """Writes the next completions of the sessions, those of a message together."""
        writing = asyncio.Lock()

        async def reply(message: generation_pb2.GenerateManyRequest) -> None:
            await self._pass(len(message.begin))
            replies = generation_pb2.GenerateManyResponse()
            for begun in message.begin:
                part = replies.parts.add(number=begun.number)
                ids = self._sessions.next_ids(begun.request.session_id)
                part.response.CopyFrom(self._replies[ids])
                part.status.SetInParent()
            async with writing:
                await context.write(replies)

        async with asyncio.TaskGroup() as group:
            async for message in requests:
                group.create_task(reply(message))

    async def _pass(self, count: int) -> None:
        """Waits for the gate, for as many requests."""
        self._missing -= count
        if self._missing > 0:
            await self._open.wait()
        self._open.set()

    async def get_server_info(self, request: server_pb2.GetServerInfoRequest, context: Any) -> Any:
        """Fits every tokenizer."""
        return server_pb2.GetServerInfoResponse(
            engine="null",
            capabilities=server_pb2.Capabilities(sampled_logprobs=True, generate_many=True),
            model=server_pb2.ModelInfo(
                architecture="null", vocab_size=1 << 18, context_length=1 << 20
            ),
        )


def _reply(ids: tuple[int, ...]) -> generation_pb2.GenerateResponse:
    batch = generation_pb2.GenerateBatch(
        started=generation_pb2.GenerateStarted(),
        tokens=[generation_pb2.TokenChunk(token_ids=ids, logprobs=[-0.5] * len(ids))],
        finished=generation_pb2.GenerateFinished(
            reason=generation_pb2.FINISH_REASON_STOP, num_tokens=len(ids)
        ),
    )
    return generation_pb2.GenerateResponse(batch=batch)


async def serve(script: Script, gate: int, host: str) -> None:
    """Serves until standard input ends."""
    # Callers ping while a call is open, which a server of gRPC refuses by default.
    server = grpc.aio.server(options=(("grpc.http2.min_ping_interval_without_data_ms", 10_000),))
    service = NullServer(script, gate)
    generate: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(
        service.generate, request_deserializer=generation_pb2.GenerateRequest.FromString
    )
    get_info: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(
        service.get_server_info,
        request_deserializer=server_pb2.GetServerInfoRequest.FromString,
        response_serializer=server_pb2.GetServerInfoResponse.SerializeToString,
    )
    many: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
        service.generate_many,
        request_deserializer=generation_pb2.GenerateManyRequest.FromString,
        response_serializer=generation_pb2.GenerateManyResponse.SerializeToString,
    )
    handlers = {"Generate": generate, "GenerateMany": many}
    server.add_registered_method_handlers(_GENERATION, handlers)
    server.add_registered_method_handlers(_SERVER, {"GetServerInfo": get_info})
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A null server.

    Attributes:
        address: host:port.
        pid: Of its process.
    """

    address: str
    pid: int


@asynccontextmanager
async def null_server(
    script: Script, *, gate: int = 0, host: str = "127.0.0.1"
) -> AsyncIterator[RunningServer]:
    """Runs a null server while the block runs.

    Args:
        script: Of all sessions.
        gate: Number of requests that it waits for before it answers the first.
        host: Where it listens; 0.0.0.0: at all addresses of this machine.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--script", json.dumps(asdict(script)), "--gate", str(gate)),
        *("--host", host),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        address = (await process.stdout.readline()).decode().strip()
        yield RunningServer(address=address, pid=process.pid)
    finally:
        process.terminate()
        await process.wait()


def main() -> None:
    """Serves in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--script", type=json.loads, required=True)
    parser.add_argument("--gate", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1")
    arguments = parser.parse_args()
    script = Script(
        call=tuple(arguments.script["call"]),
        last=tuple(arguments.script["last"]),
        turns=arguments.script["turns"],
    )
    uvloop.run(serve(script, arguments.gate, arguments.host))


if __name__ == "__main__":
    main()
