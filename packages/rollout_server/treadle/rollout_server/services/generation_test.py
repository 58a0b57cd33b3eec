"""The messages of Generate, over real gRPC."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import grpc.aio
import pytest

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
from treadle.rollout_server.observability.server_stats import ServerStats
from treadle.rollout_server.replica import Replica
from treadle.rollout_server.services.generation import GenerationServicer
from treadle.rollout_server.testing import serve_in_process
from treadle.tracing import NullSink

MODEL = ModelInfo(architecture="x", vocab_size=9, context_length=64, eos_token_ids=frozenset())
EVENTS: list[EngineEvent] = [Started(2), Tokens((1, 2), (-0.5, -1.0), 3), Tokens((4,), (-2.0,), 4)]
END = Finished(FinishReason.LENGTH)


class Scripted(FakeEngine):
    """Says `EVENTS` at once, then `END` when the test says so."""

    def __init__(self) -> None:
        super().__init__(model=MODEL, clock=asyncio.get_running_loop())
        self.go_on = asyncio.Event()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        for event in EVENTS:
            yield event
        await self.go_on.wait()
        yield END


def wanted(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        sampling=pb.SamplingParams(max_tokens=3),
        logprob_mode=pb.LOGPROB_MODE_SAMPLED,
        **fields,
    )


async def messages_of(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Those of one call whose engine goes on once the first event has come."""
    engine = Scripted()
    messages = []
    async with (
        serve_in_process(engine) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        async for message in stubs_for(channel).generation.Generate(request, timeout=60):
            messages.append(message)
            engine.go_on.set()
    return messages


@pytest.mark.asyncio
async def test_older_clients_get_an_event_a_message() -> None:
    kinds = [message.WhichOneof("event") for message in await messages_of(wanted())]
    assert kinds == ["started", "tokens", "tokens", "finished"]


@pytest.mark.asyncio
async def test_events_that_are_ready_together_come_in_one_message() -> None:
    first, *rest = await messages_of(wanted(batched=True))
    assert first.batch.started.cached_prompt_tokens == 2
    assert not first.batch.HasField("finished")
    chunks = [*first.batch.tokens]
    for message in rest:
        chunks += message.batch.tokens
        chunks += [message.tokens] if message.HasField("tokens") else []
    assert [(list(c.token_ids), c.weight_version) for c in chunks] == [([1, 2], 3), ([4], 4)]
    last = rest[-1].finished if rest[-1].HasField("finished") else rest[-1].batch.finished
    assert (last.num_tokens, last.reason) == (3, pb.FINISH_REASON_LENGTH)


class Prompt(FakeEngine):
    """Says a million tokens without a pause, and then that it has finished, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        model = dataclasses.replace(MODEL, context_length=2_000_000)
        super().__init__(model=model, clock=asyncio.get_running_loop())
        self.said_all = asyncio.Event()
        self._error = error

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        yield Started(0)
        for _ in range(1000):
            yield Tokens((8,) * 1000, (-1.0,) * 1000, 1)
        self.said_all.set()
        if self._error is not None:
            raise self._error
        yield END


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [None, RuntimeError("the device is lost")])
async def test_a_client_that_stalls_gets_every_token_in_messages_that_grpc_takes(
    error: Exception | None,
) -> None:
    engine = Prompt(error)
    request = wanted(batched=True)
    request.sampling.max_tokens = 1_000_000
    num_tokens = 0
    async with (
        serve_in_process(engine) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        call = stubs_for(channel).generation.Generate(request, timeout=60)
        await engine.said_all.wait()
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for message in call:
                num_tokens += sum(len(chunk.token_ids) for chunk in message.batch.tokens)
        code = await call.code()
    assert num_tokens == 1_000_000
    assert code is (grpc.StatusCode.OK if error is None else grpc.StatusCode.INTERNAL)


@pytest.mark.asyncio
async def test_a_completion_whose_caller_has_gone_counts_as_cancelled() -> None:
    engine, stats = Scripted(), ServerStats()
    replica = Replica(ServerConfig(), asyncio.get_running_loop())
    replica.serve(engine)

    class Gone:
        def invocation_metadata(self) -> None:
            raise AssertionError("without a sink nobody reads it")

        async def write(self, message: bytes) -> None:
            engine.go_on.set()
            raise grpc.aio.InternalError("the stream has ended")

    context: Any = Gone()
    with pytest.raises(grpc.aio.InternalError):
        await GenerationServicer(replica, stats, NullSink()).generate(wanted(batched=True), context)
    assert stats.completions == {"cancelled": 1}
    assert replica.admission.in_flight == 0
    await replica.aclose()
