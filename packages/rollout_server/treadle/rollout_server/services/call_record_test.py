"""Where the time of a call goes: on the wire and in the server's spans, over real gRPC."""

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from treadle.conformance.client.stubs import stubs_for
from treadle.rollout.v1 import generation_service_pb2 as pb
from treadle.rollout_server.config.schema import ServerConfig, ServerTracingConfig
from treadle.rollout_server.engine import (
    EngineEvent,
    EngineRequest,
    Finished,
    FinishReason,
    InFlightPolicy,
    ModelInfo,
    Started,
    Tokens,
)
from treadle.rollout_server.engines.fake.engine import FakeEngine
from treadle.rollout_server.replica import Replica
from treadle.rollout_server.testing import FakeClock, serve_in_process

MODEL = ModelInfo(architecture="x", vocab_size=9, context_length=64, eos_token_ids=frozenset())
TRACE_ID, SPAN_ID = "a" * 32, "b" * 16
RECORDED = (("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01"),)
UNRECORDED = (("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-00"),)


class Timed(FakeEngine):
    """Takes 2 s to start and says so half a second late; 3 s to the first token; then a pause."""

    def __init__(self, *, late_tokens: bool = False) -> None:
        self.clock = FakeClock(100.0)
        super().__init__(model=MODEL, clock=self.clock)
        self.replica: Replica | None = None
        self.late_tokens = late_tokens

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        assert self.replica is not None
        self.clock.advance(2.5)
        yield Started(1, since_s=0.5)
        self.clock.advance(2.5)
        if self.late_tokens:
            self.clock.advance(0.25)
        yield Tokens((1, 2), (-1.0, -1.0), 0)
        self.clock.advance(1)
        await self.replica.pause(InFlightPolicy.CONTINUE)
        self.clock.advance(5)
        await self.replica.resume()
        self.clock.advance(1)
        if request.request_id == "fails":
            raise RuntimeError("the device is lost")
        yield Finished(FinishReason.LENGTH, prefill_s=3.0 if self.late_tokens else None)


async def call(
    engine: Timed, config: ServerConfig, request_id: str, metadata: Any = RECORDED
) -> list[pb.GenerateResponse]:
    request = pb.GenerateRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        sampling=pb.SamplingParams(max_tokens=2),
        logprob_mode=pb.LOGPROB_MODE_SAMPLED,
    )
    async with (
        serve_in_process(engine, config=config, clock=engine.clock) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        engine.replica = server.replica
        stream = stubs_for(channel).generation.Generate(request, timeout=60, metadata=metadata)
        return [message async for message in stream]


def tracing_to(path: Path) -> ServerConfig:
    return ServerConfig(tracing=ServerTracingConfig(jsonl=path))


def spans_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def offsets(spans: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Names, and seconds from the first start."""
    first = min(span["start_unix_ns"] for span in spans)
    return [
        (span["name"], (span["start_unix_ns"] - first) / 1e9, span["duration_ns"] / 1e9)
        for span in spans
    ]


@pytest.mark.asyncio
@pytest.mark.parametrize("late_tokens", [False, True], ids=["timely", "in groups"])
async def test_the_times_of_a_completion_are_told_and_traced(
    tmp_path: Path, late_tokens: bool
) -> None:
    path = tmp_path / "spans.jsonl"
    messages = await call(Timed(late_tokens=late_tokens), tracing_to(path), "r")
    late = 0.25 if late_tokens else 0.0
    assert messages[0].started.queue_time.ToMilliseconds() == 2000
    finished = messages[-1].finished
    assert finished.engine_time.ToMilliseconds() == 10_000 + 1000 * late
    assert finished.prefill_time.ToMilliseconds() == 3000
    assert finished.paused_time.ToMilliseconds() == 5000

    *phases, whole = spans_in(path)
    assert whole["name"] == "server.generate"
    assert (whole["trace_id"], whole["parent_id"]) == (TRACE_ID, SPAN_ID)
    assert whole["attributes"] == {
        "request_id": "r",
        "prompt_tokens": 3,
        "cached_prompt_tokens": 1,
        "tokens": 2,
        "outcome": "length",
    }
    assert {span["parent_id"] for span in phases} == {whole["span_id"]}
    assert offsets(phases) == [
        ("queue", 0, 2),
        ("prefill", 2, 3),
        ("decode", 5, 7 + late),
        ("paused", 6 + late, 5),
    ]


@pytest.mark.asyncio
async def test_a_completion_that_fails_is_traced_with_its_error(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    with pytest.raises(grpc.aio.AioRpcError):
        await call(Timed(), tracing_to(path), "fails")
    whole = spans_in(path)[-1]
    assert whole["error"]["type"] == "EngineFailed"
    assert "the device is lost" in whole["error"]["message"]
    assert whole["attributes"]["outcome"] == "engine_failed"


@pytest.mark.asyncio
@pytest.mark.parametrize("metadata", [(), UNRECORDED], ids=["no caller's span", "not recorded"])
async def test_the_caller_decides_what_is_traced(tmp_path: Path, metadata: Any) -> None:
    path = tmp_path / "spans.jsonl"
    await call(Timed(), tracing_to(path), "r", metadata)
    assert spans_in(path) == []


@pytest.mark.asyncio
async def test_a_file_that_cannot_be_opened_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        await call(Timed(), tracing_to(tmp_path / "file" / "spans.jsonl"), "r")
