"""GenerateMany, over real gRPC."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from treadle.conformance.client.stubs import stubs_for
from treadle.rollout.v1 import generation_service_pb2 as pb
from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import (
    EngineEvent,
    EngineRequest,
    Finished,
    FinishReason,
    ModelInfo,
    Started,
    Tokens,
)
from treadle.rollout_server.engines.fake.engine import FakeEngine
from treadle.rollout_server.testing import serve_in_process

pytestmark = pytest.mark.asyncio

MODEL = ModelInfo(architecture="x", vocab_size=9, context_length=64, eos_token_ids=frozenset())
OK = grpc.StatusCode.OK.value[0]


class Held(FakeEngine):
    """Says a token of each completion at once, and ends those that the test lets go."""

    def __init__(self) -> None:
        super().__init__(model=MODEL, clock=asyncio.get_running_loop())
        self.running: dict[str, asyncio.Event] = {}
        self.left: set[str] = set()
        self.one_left = asyncio.Event()
        self.error: Exception | None = None

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        go_on = self.running.setdefault(request.request_id, asyncio.Event())
        try:
            yield Started(0)
            yield Tokens((7,), (-0.5,), 0)
            await go_on.wait()
            if self.error is not None:
                raise self.error
            yield Finished(FinishReason.STOP)
        finally:
            self.left.add(request.request_id)
            self.one_left.set()


def begin(number: int, name: str, *, timeout_s: float | None = 60.0, **fields: Any) -> Any:
    values: dict[str, Any] = {
        "request_id": name,
        "prompt_token_ids": [1],
        "sampling": pb.SamplingParams(max_tokens=3),
        "logprob_mode": pb.LOGPROB_MODE_SAMPLED,
        "batched": True,
    } | fields
    begun = pb.NumberedRequest(number=number, request=pb.GenerateRequest(**values))
    if timeout_s is not None:
        begun.timeout.CopyFrom(duration_pb2.Duration(nanos=round(timeout_s * 1e9) % 10**9))
        begun.timeout.seconds = int(timeout_s)
    return begun


class Caller:
    """The test's end of one call."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._parts: list[pb.NumberedResponse] = []

    async def send(
        self, begun: Iterable[pb.NumberedRequest] = (), cancel: Iterable[int] = ()
    ) -> None:
        await self.call.write(pb.GenerateManyRequest(begin=begun, cancel=cancel))

    async def part(self) -> pb.NumberedResponse:
        """Returns the next part."""
        while not self._parts:
            message = await self.call.read()
            assert message is not grpc.aio.EOF
            self._parts += message.parts
        return self._parts.pop(0)

    async def end_of(self, number: int) -> pb.CompletionStatus:
        """Returns the status of a completion; what comes before it is passed over."""
        while True:
            part = await self.part()
            if part.number == number and part.HasField("status"):
                return part.status


@asynccontextmanager
async def calling(engine: Held, config: ServerConfig | None = None) -> AsyncIterator[Caller]:
    async with (
        serve_in_process(engine, config=config) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield Caller(stubs_for(channel).generation.GenerateMany(timeout=60))
        assert server.replica.admission.in_flight == 0


def reason_of(status: pb.CompletionStatus) -> str:
    info = error_details_pb2.ErrorInfo()
    status_pb2.Status.FromString(status.details).details[0].Unpack(info)
    return str(info.reason)


async def test_completions_share_a_call_and_end_on_their_own() -> None:
    engine = Held()
    async with calling(engine) as caller:
        await caller.send([begin(1, "a"), begin(2, "b")])
        first = {(await caller.part()).number, (await caller.part()).number}
        assert first == {1, 2}
        engine.running["b"].set()
        part = await caller.part()
        assert (part.number, part.status.code) == (2, OK)
        assert part.response.finished.num_tokens == 1
        await caller.send([begin(3, "c")])
        assert (await caller.part()).number == 3
        engine.running["a"].set()
        engine.running["c"].set()
        await caller.call.done_writing()
        assert {(await caller.part()).number, (await caller.part()).number} == {1, 3}
        assert await caller.call.read() is grpc.aio.EOF


async def test_a_refused_completion_and_a_late_one_leave_the_others_alone() -> None:
    engine = Held()
    async with calling(engine) as caller:
        await caller.send([begin(1, "a")])
        assert (await caller.part()).number == 1
        await caller.send([begin(2, "b", prompt_token_ids=[])])
        refused = await caller.end_of(2)
        assert refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert reason_of(refused) == "INVALID_FIELD"
        await caller.send([begin(3, "c", timeout_s=None)])
        assert reason_of(await caller.end_of(3)) == "DEADLINE_REQUIRED"
        await caller.send([begin(4, "d", timeout_s=0.0)])
        late = await caller.end_of(4)
        assert late.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        engine.running["a"].set()
        assert (await caller.end_of(1)).code == OK


async def test_what_is_cancelled_leaves_the_engine_and_says_nothing_more() -> None:
    engine = Held()
    async with calling(engine) as caller:
        await caller.send([begin(1, "a"), begin(2, "b")])
        await caller.part()
        await caller.part()
        await caller.send(cancel=[1, 17])
        await engine.one_left.wait()
        assert engine.left == {"a"}
        engine.running["b"].set()
        part = await caller.part()
        assert (part.number, part.status.code) == (2, OK)


async def test_everything_leaves_the_engine_with_the_call() -> None:
    engine = Held()
    async with calling(engine) as caller:
        await caller.send([begin(1, "a"), begin(2, "b")])
        await caller.part()
        await caller.part()
        caller.call.cancel()
        while len(engine.left) < 2:
            engine.one_left.clear()
            await engine.one_left.wait()


async def test_a_number_in_use_fails_the_call() -> None:
    engine = Held()
    async with calling(engine) as caller:
        await caller.send([begin(1, "a")])
        await caller.part()
        await caller.send([begin(1, "b")])
        assert await caller.call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "begin.number is 1" in await caller.call.details()


async def test_an_engine_that_fails_fails_the_completion() -> None:
    engine = Held()
    engine.error = RuntimeError("the device is lost")
    async with calling(engine) as caller:
        await caller.send([begin(1, "a")])
        await caller.part()
        engine.running["a"].set()
        failed = await caller.end_of(1)
        assert failed.code == grpc.StatusCode.INTERNAL.value[0]
        assert reason_of(failed) == "ENGINE_FAILED"


async def test_open_calls_do_not_delay_a_shutdown() -> None:
    engine = Held()
    serving = serve_in_process(engine, config=ServerConfig(shutdown_grace_s=600))
    server = await serving.__aenter__()
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = stubs_for(channel).generation
        busy, idle = (Caller(stub.GenerateMany(timeout=600)) for _ in range(2))
        await busy.send([begin(1, "a")])
        await busy.part()
        await idle.send()
        stopping = asyncio.create_task(serving.__aexit__(None, None, None))
        assert await idle.call.read() is grpc.aio.EOF
        engine.running["a"].set()  # what has begun ends first
        assert (await busy.end_of(1)).code == OK
        assert await busy.call.read() is grpc.aio.EOF
        await stopping
