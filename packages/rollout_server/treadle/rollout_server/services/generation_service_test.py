"""Generate and the handshake over real gRPC, in front of the fake engine."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.config.schema import AdmissionConfig, ServerConfig
from treadle.rollout_server.services.conftest import fake_server, ids, refusal, want


@pytest.mark.asyncio
async def test_a_completion_is_started_chunks_finished() -> None:
    async with fake_server() as server:
        messages = await server.generate(
            sampling=gen.SamplingParams(max_tokens=70, ignore_eos=True)
        )
    kinds = [message.WhichOneof("event") for message in messages]
    assert kinds == ["started", *["tokens"] * 4, "finished"]
    assert [len(m.tokens.token_ids) for m in messages[1:-1]] == [1, 32, 32, 5]
    assert all(len(m.tokens.logprobs) == len(m.tokens.token_ids) for m in messages[1:-1])
    assert messages[-1].finished.num_tokens == 70
    assert messages[-1].finished.reason == gen.FINISH_REASON_LENGTH


@pytest.mark.asyncio
async def test_unset_is_the_default_and_zero_is_zero() -> None:
    async with fake_server() as server:
        plain = ids(await server.generate(sampling=gen.SamplingParams(max_tokens=8, seed=5)))
        explicit = gen.SamplingParams(
            max_tokens=8, seed=5, temperature=1, top_p=1, min_p=0, repetition_penalty=1
        )
        same = ids(await server.generate(sampling=explicit))
        greedy = [
            ids(
                await server.generate(
                    sampling=gen.SamplingParams(max_tokens=8, temperature=0, seed=s)
                )
            )
            for s in (1, 2)
        ]
        unlogged = await server.generate(logprob_mode=gen.LOGPROB_MODE_NONE)
    assert plain == same
    assert greedy[0] == greedy[1]
    assert not any(message.tokens.logprobs for message in unlogged)


SAMPLING = gen.SamplingParams


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("request_id", {"request_id": ""}),
        ("request_id", {"request_id": "x" * 129}),
        ("session_id", {"session_id": "x" * 129}),
        ("prompt_token_ids", {"prompt_token_ids": []}),
        ("prompt_token_ids[1]", {"prompt_token_ids": [1, 64]}),
        ("logprob_mode", {"logprob_mode": gen.LOGPROB_MODE_UNSPECIFIED}),
        ("logprob_mode", {"logprob_mode": 9}),
        ("sampling.max_tokens", {"sampling": SAMPLING()}),
        ("sampling.max_tokens", {"sampling": SAMPLING(max_tokens=0)}),
        ("sampling.temperature", {"sampling": SAMPLING(max_tokens=1, temperature=-1)}),
        ("sampling.temperature", {"sampling": SAMPLING(max_tokens=1, temperature=float("nan"))}),
        ("sampling.top_p", {"sampling": SAMPLING(max_tokens=1, top_p=0)}),
        ("sampling.top_p", {"sampling": SAMPLING(max_tokens=1, top_p=1.5)}),
        ("sampling.top_k", {"sampling": SAMPLING(max_tokens=1, top_k=0)}),
        ("sampling.min_p", {"sampling": SAMPLING(max_tokens=1, min_p=2)}),
        ("sampling.repetition_penalty", {"sampling": SAMPLING(max_tokens=1, repetition_penalty=0)}),
        ("sampling.stop_token_ids[0]", {"sampling": SAMPLING(max_tokens=1, stop_token_ids=[64])}),
    ],
)
async def test_a_value_out_of_range_is_named(field: str, fields: dict[str, Any]) -> None:
    async with fake_server() as server:
        code, reason, (detail,) = await refusal(server.generate(**fields))
        assert server.engine.counters.started == 0
    assert (code, reason, detail.field) == ("INVALID_ARGUMENT", "INVALID_FIELD", field)
    assert detail.expected


@pytest.mark.asyncio
async def test_the_context_bounds_prompt_and_completion() -> None:
    async with fake_server() as server:
        code, reason, (detail,) = await refusal(server.generate(prompt_token_ids=[1] * 256))
        greedy = gen.SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
        messages = await server.generate(prompt_token_ids=[1] * 250, sampling=greedy)
    assert (code, reason) == ("INVALID_ARGUMENT", "PROMPT_TOO_LONG")
    assert (detail.prompt_tokens, detail.context_length) == (256, 256)
    assert len(ids(messages)) == 6
    assert messages[-1].finished.reason == gen.FINISH_REASON_LENGTH


@pytest.mark.asyncio
async def test_a_call_without_a_deadline_is_refused() -> None:
    async with fake_server() as server:
        code, reason, _ = await refusal(server.generation.Generate(want()).read())
        other = await refusal(server.control.GetServerInfo(srv.GetServerInfoRequest()))
    assert (code, reason) == ("INVALID_ARGUMENT", "DEADLINE_REQUIRED")
    assert other[1] == "DEADLINE_REQUIRED"


@pytest.mark.asyncio
async def test_cancelling_the_call_aborts_the_sequence() -> None:
    async with fake_server(latency_s=1.0) as server:
        call = server.generation.Generate(want(), timeout=60)
        assert (await call.read()).WhichOneof("event") == "started"
        call.cancel()
        # Draining waits for the sequence, so once it answers the abort has happened.
        await server.control.Pause(
            srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_DRAIN), timeout=60
        )
        counters = server.engine.counters
    assert (counters.started, counters.aborted, counters.running) == (1, 1, 0)


@pytest.mark.asyncio
async def test_a_deadline_aborts_the_sequence() -> None:
    timeout_s = 0.1
    async with fake_server(latency_s=1.0) as server:
        while (
            not server.engine.counters.started
        ):  # Else it was over before the engine had the call.
            timeout_s *= 2
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in server.generation.Generate(want(), timeout=timeout_s):
                    pass
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await server.control.Pause(
            srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_DRAIN), timeout=60
        )
        assert server.engine.counters.aborted == server.engine.counters.started


@pytest.mark.asyncio
async def test_a_full_queue_is_resource_exhausted_with_a_delay() -> None:
    config = ServerConfig(admission=AdmissionConfig(max_in_flight=1, max_queued=1))
    async with fake_server(latency_s=1.0, config=config) as server:
        first = server.generation.Generate(want(), timeout=60)
        await first.read()
        second = asyncio.create_task(server.generate())
        while server.replica.admission.queued == 0:
            await server.settle()
        code, reason, (retry,) = await refusal(server.generate())
        assert (code, reason) == ("RESOURCE_EXHAUSTED", "OVERLOADED")
        assert retry.retry_delay.ToTimedelta().total_seconds() > 0
        first.cancel()
        assert len(ids(await server.ticking(second, 1.0))) == 8


@pytest.mark.asyncio
async def test_tokens_do_not_wait_longer_than_half_a_second() -> None:
    async with fake_server(latency_s=0.03) as server:
        call = server.generation.Generate(want(), timeout=60)
        await call.read()
        server.clock.advance(0.03)
        await server.settle()
        assert server.engine.counters.running == 1
        server.clock.advance(0.5)
        chunk = await call.read()
        assert chunk.WhichOneof("event") == "tokens"
        assert 1 <= len(chunk.tokens.token_ids) < 8
        call.cancel()


@pytest.mark.asyncio
async def test_the_handshake_tells_what_clients_compare() -> None:
    async with fake_server() as server:
        info = await server.control.GetServerInfo(
            srv.GetServerInfoRequest(client="t/1"), timeout=60
        )
    assert (info.engine, info.state) == ("fake", srv.SERVER_STATE_SERVING)
    assert info.model.tokenizer_sha256 == b"\7" * 32
    assert (info.model.vocab_size, info.model.context_length) == (64, 256)
    assert info.capabilities.inline_transport and not info.capabilities.file_transport
    assert info.limits.max_in_flight == 256
    assert list(info.model.eos_token_ids) == [2, 5]
    assert info.num_workers == 1
    assert info.capabilities.in_place_update
