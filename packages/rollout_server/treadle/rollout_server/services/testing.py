"""A server with the fake engine behind real gRPC, and the requests that tests send it."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf import duration_pb2

from treadle.conformance.client import refusals
from treadle.conformance.client.stubs import stubs_for
from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import ElementType, ModelInfo, TensorSpec
from treadle.rollout_server.engines.fake.engine import FakeEngine, FakeLatency
from treadle.rollout_server.replica import Replica
from treadle.rollout_server.testing import FakeClock, serve_in_process

T = TypeVar("T")

MODEL = ModelInfo(
    architecture="fake",
    vocab_size=64,
    context_length=256,
    eos_token_ids=frozenset({5, 2}),
    tokenizer_sha256=b"\7" * 32,
)


PARAMETERS = (
    TensorSpec(name="a", element_type=ElementType.FLOAT32, shape=(4, 8)),
    TensorSpec(name="b", element_type=ElementType.FLOAT32, shape=()),
)


BYTES = (bytes(range(128)), b"abcd")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerHarness:
    """One server with the fake engine, and stubs that speak to it."""

    address: str
    replica: Replica
    engine: FakeEngine
    clock: FakeClock
    generation: Any
    weights: Any
    control: Any

    async def generate(self, **fields: object) -> list[gen.GenerateResponse]:
        """Returns all messages of one completion; the fields are those of `want`."""
        return [message async for message in self.generation.Generate(want(**fields), timeout=60)]

    async def settle(self) -> None:
        """Waits for the answer to a call, so that everything sent before it has been handled."""
        await self.control.GetServerInfo(srv.GetServerInfoRequest(), timeout=60)

    async def tick(self, seconds: float = 0.001) -> None:
        """Advances the engine's clock."""
        self.clock.advance(seconds)
        await self.settle()

    async def ticking(self, call: Awaitable[T], seconds: float = 0.001) -> T:
        """Returns the result of a call while the engine's clock advances tick by tick."""
        waited = asyncio.ensure_future(call)
        while not waited.done():
            await self.tick(seconds)
        return await waited


@asynccontextmanager
async def fake_server(
    *, latency_s: float = 0.0, max_running: int = 8, config: ServerConfig | None = None
) -> AsyncIterator[ServerHarness]:
    """Runs a server. With latency, the test must advance the clock."""
    clock = FakeClock()
    engine = FakeEngine(
        model=MODEL,
        parameters=PARAMETERS,
        latency=FakeLatency(decode_s_per_token=latency_s),
        max_running=max_running,
        clock=clock,
    )
    async with (
        serve_in_process(engine, config=config, clock=clock) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stubs = stubs_for(channel)
        yield ServerHarness(
            address=server.address,
            replica=server.replica,
            engine=engine,
            clock=clock,
            generation=stubs.generation,
            weights=stubs.weights,
            control=stubs.control,
        )


def want(**fields: object) -> gen.GenerateRequest:
    """Builds a request for 8 tokens, with the given fields in place of the defaults."""
    values: dict[str, Any] = {
        "request_id": "r",
        "prompt_token_ids": [1, 2, 3],
        "sampling": gen.SamplingParams(max_tokens=8, temperature=1.0, seed=5, ignore_eos=True),
        "logprob_mode": gen.LOGPROB_MODE_SAMPLED,
    } | fields
    return gen.GenerateRequest(**values)


def begin_request(version: int = 1, update_id: str = "u", **fields: Any) -> sync.BeginUpdateRequest:
    """Builds an inline update of `PARAMETERS`, with the given fields in place of the defaults."""
    values: dict[str, Any] = {
        "tensors": [
            sync.TensorSpec(name=s.name, element_type=sync.ELEMENT_TYPE_FLOAT32, shape=s.shape)
            for s in PARAMETERS
        ],
        "lease": duration_pb2.Duration(seconds=60),
        "inline": sync.InlineTransport(),
    } | fields
    return sync.BeginUpdateRequest(update_id=update_id, weight_version=version, **values)


def chunk(
    index: int, offset: int, data: bytes, crc32: int | None = None
) -> sync.PushWeightsRequest:
    """Builds a chunk; its checksum is right unless another is given."""
    return sync.PushWeightsRequest(
        chunk=sync.WeightChunk(
            tensor_index=index,
            offset=offset,
            data=data,
            crc32=zlib.crc32(data) if crc32 is None else crc32,
        )
    )


def push(update_id: str = "u") -> list[sync.PushWeightsRequest]:
    """Builds a whole push of `BYTES`, the first tensor in two chunks."""
    header = sync.PushWeightsRequest(header=sync.PushHeader(update_id=update_id))
    whole = BYTES[0]
    return [header, chunk(0, 0, whole[:100]), chunk(1, 0, BYTES[1]), chunk(0, 100, whole[100:])]


async def commit(
    server: ServerHarness,
    policy: "sync.InFlightPolicy" = sync.IN_FLIGHT_POLICY_DRAIN,
    update_id: str = "u",
) -> int:
    """Commits an update; returns the version that the server then serves."""
    request = sync.CommitUpdateRequest(update_id=update_id, in_flight=policy)
    response = await server.weights.CommitUpdate(request, timeout=60)
    return int(response.weight_version)


async def refusal(call: Awaitable[object]) -> tuple[str, str, list[Any]]:
    """Returns status name, reason and further details of a call that must fail."""
    refused = await refusals.refusal(call)
    return refused.code, refused.reason, list(refused.details)


def ids(messages: Sequence[gen.GenerateResponse]) -> list[int]:
    """Returns the sampled token ids of a stream."""
    return [i for message in messages for i in message.tokens.token_ids]


async def read_all(call: Any) -> list[gen.GenerateResponse]:
    """Returns the rest of a stream that `read` has begun."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages
