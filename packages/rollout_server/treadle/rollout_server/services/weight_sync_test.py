"""Staged updates over real gRPC, in front of the fake engine."""

import asyncio
import struct
import zlib
from pathlib import Path

import grpc.aio
import pytest
from google.protobuf import duration_pb2

from treadle.conformance.client.stubs import stubs_for
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.config.schema import ServerConfig, WeightsConfig
from treadle.rollout_server.engines.fake.engine import FakeEngine
from treadle.rollout_server.errors import CapabilityMissing
from treadle.rollout_server.scheduling.lifecycle import ServerState
from treadle.rollout_server.services.testing import (
    BYTES,
    MODEL,
    begin_request,
    commit,
    fake_server,
    ids,
    push,
    read_all,
    refusal,
    want,
)
from treadle.rollout_server.testing import FakeClock, serve_in_process


@pytest.mark.asyncio
async def test_new_weights_begin_a_new_chunk() -> None:
    async with fake_server(latency_s=0.001) as server:
        call = server.generation.Generate(want(), timeout=60)
        await call.read()
        for _ in range(3):
            await server.tick()
        await server.weights.BeginUpdate(begin_request(), timeout=60)
        await server.weights.PushWeights(push(), timeout=60)
        await commit(server, sync.IN_FLIGHT_POLICY_CONTINUE)
        messages = await server.ticking(read_all(call))
    chunks = [m.tokens for m in messages if m.WhichOneof("event") == "tokens"]
    assert [c.weight_version for c in chunks] == [0, 0, 1]  # The first token comes alone.
    assert sum(len(c.token_ids) for c in chunks) == 8


@pytest.mark.asyncio
@pytest.mark.parametrize("seconds", [10**6, 10**17])
async def test_a_lease_above_the_maximum_is_refused(seconds: int) -> None:
    async with fake_server() as server:
        request = begin_request(lease=duration_pb2.Duration(seconds=seconds))
        _, reason, (detail,) = await refusal(server.weights.BeginUpdate(request, timeout=60))
    assert (reason, detail.field) == ("INVALID_FIELD", "lease")


@pytest.mark.asyncio
async def test_an_update_that_was_read_from_files_needs_them_no_more(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    header = (
        b'{"a":{"dtype":"F32","shape":[4,8],"data_offsets":[0,128]},'
        b'"b":{"dtype":"F32","shape":[],"data_offsets":[128,132]}}'
    )
    path = tmp_path / "1" / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"".join(BYTES))
    crc32 = [zlib.crc32(data) for data in BYTES]
    config = ServerConfig(weights=WeightsConfig(directory=tmp_path))
    request = begin_request(inline=None, file=sync.FileTransport(directory="1", crc32=crc32))
    async with fake_server(config=config) as server:
        begun = await server.weights.BeginUpdate(request, timeout=60)
        assert list(begun.received_bytes) == [128, 4]
        path.unlink()
        assert await server.weights.BeginUpdate(request, timeout=60) == begun
        pushed = await refusal(server.weights.PushWeights(push(), timeout=60))
        assert pushed[:2] == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert await commit(server) == 1


@pytest.mark.asyncio
async def test_calls_during_a_commit_of_a_paused_server_are_rejected_after_it() -> None:
    async with fake_server(latency_s=1.0) as server:
        call = server.generation.Generate(want(), timeout=60)
        await call.read()
        await server.control.Pause(
            srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_CONTINUE), timeout=60
        )
        await server.weights.BeginUpdate(begin_request(), timeout=60)
        await server.weights.PushWeights(push(), timeout=60)
        committing = asyncio.create_task(commit(server))
        while server.replica.state is not ServerState.UPDATING:
            await server.settle()
        queued = asyncio.create_task(refusal(server.generate()))
        while server.replica.admission.queued == 0:
            await server.settle()
        assert await server.ticking(committing, 1.0) == 1
        assert (await queued)[:2] == ("UNAVAILABLE", "PAUSED")
        info = await server.control.GetServerInfo(srv.GetServerInfoRequest(), timeout=60)
        assert info.state == srv.SERVER_STATE_PAUSED


@pytest.mark.asyncio
async def test_an_engine_that_refuses_new_weights_goes_on_with_the_old_ones() -> None:
    async with fake_server() as server:
        before = ids(await server.generate())
        await server.weights.BeginUpdate(begin_request(), timeout=60)
        await server.weights.PushWeights(push(), timeout=60)

        async def refuse(*_: object, **__: object) -> None:
            raise CapabilityMissing("fake", "float8")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.engine, "load_weights", refuse)
            assert (await refusal(commit(server)))[:2] == ("UNIMPLEMENTED", "CAPABILITY_MISSING")
        assert server.replica.state is ServerState.SERVING
        assert ids(await server.generate()) == before
        assert await commit(server) == 1


@pytest.mark.asyncio
async def test_calls_during_a_commit_queue_and_get_the_new_weights() -> None:
    async with fake_server(latency_s=1.0) as server:
        call = server.generation.Generate(want(), timeout=60)
        await call.read()
        await server.weights.BeginUpdate(begin_request(), timeout=60)
        await server.weights.PushWeights(push(), timeout=60)
        committing = asyncio.create_task(commit(server))
        info = srv.GetServerInfoRequest()
        while (
            await server.control.GetServerInfo(info, timeout=60)
        ).state != srv.SERVER_STATE_UPDATING:
            pass
        queued = asyncio.create_task(server.generate(min_weight_version=1))
        while server.replica.admission.queued == 0:
            await server.settle()
        while not (committing.done() and queued.done()):
            server.clock.advance(1.0)
            await server.settle()
        old = await read_all(call)
        assert await committing == 1
    assert {m.tokens.weight_version for m in old[:-1]} == {0}
    assert {m.tokens.weight_version for m in (await queued)[1:-1]} == {1}


@pytest.mark.asyncio
async def test_an_update_may_announce_fifty_thousand_tensors() -> None:
    names = [
        f"model.language_model.layers.{n % 61}.block_sparse_moe.experts.{n}.down_proj.weight"
        for n in range(50_000)
    ]
    specs = [
        sync.TensorSpec(name=name, element_type=sync.ELEMENT_TYPE_FLOAT32, shape=[2048, 0])
        for name in names
    ]
    engine = FakeEngine(model=MODEL, clock=FakeClock())
    async with (
        serve_in_process(engine) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        request = begin_request(tensors=specs)
        assert request.ByteSize() > 4 << 20  # what gRPC takes by default
        weights = stubs_for(channel).weights
        begun = await weights.BeginUpdate(request, timeout=60)
        assert len(begun.received_bytes) == 50_000
