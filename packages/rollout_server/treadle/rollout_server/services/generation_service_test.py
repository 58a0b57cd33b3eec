"""Generate and the handshake over real gRPC, in front of the fake engine."""

import pytest

from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.services.testing import fake_server, want


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
    assert info.capabilities.in_place_update and info.capabilities.delta_encoding
