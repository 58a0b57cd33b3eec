"""Staged updates over real gRPC, in front of the fake engine."""

import asyncio
import struct
import zlib
from pathlib import Path
from typing import Any

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
from treadle.rollout_server.services.conftest import (
    BYTES,
    MODEL,
    begin_request,
    chunk,
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
async def test_an_update_replaces_the_weights_at_commit() -> None:
    async with fake_server() as server:
        before = ids(await server.generate())
        begun = await server.weights.BeginUpdate(begin_request(), timeout=60)
        assert list(begun.received_bytes) == [0, 0]
        pushed = await server.weights.PushWeights(push(), timeout=60)
        assert pushed.received_bytes == 132
        assert ids(await server.generate()) == before
        assert await commit(server) == 1
        assert await commit(server) == 1
        after = await server.generate()
        code, reason, (behind,) = await refusal(server.generate(min_weight_version=2))
        stale = await refusal(server.weights.BeginUpdate(begin_request(1, "v"), timeout=60))
    assert ids(after) != before
    assert {m.tokens.weight_version for m in after[1:-1]} == {1}
    assert (code, reason) == ("FAILED_PRECONDITION", "WEIGHT_VERSION_BEHIND")
    assert (behind.serving, behind.wanted) == (1, 2)
    assert stale[1] == "WEIGHT_VERSION_BEHIND"


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
async def test_a_broken_push_resumes_where_it_broke() -> None:
    async with fake_server() as server:
        await server.weights.BeginUpdate(begin_request(), timeout=60)
        messages = push()
        corrupt = chunk(0, 100, BYTES[0][100:], crc32=1)
        code, reason, _ = await refusal(
            server.weights.PushWeights([*messages[:2], corrupt], timeout=60)
        )
        assert (code, reason) == ("DATA_LOSS", "CHUNK_CORRUPT")
        again = await server.weights.BeginUpdate(begin_request(), timeout=60)
        assert list(again.received_bytes) == [100, 0]
        code, reason, (order,) = await refusal(server.weights.PushWeights(messages, timeout=60))
        assert (code, reason) == ("OUT_OF_RANGE", "CHUNK_OUT_OF_ORDER")
        assert (order.tensor_index, order.expected_offset) == (0, 100)
        code, reason, (lacking,) = await refusal(commit(server))
        assert (code, reason) == ("FAILED_PRECONDITION", "UPDATE_INCOMPLETE")
        assert list(lacking.tensor_indices) == [0, 1]
        await server.weights.PushWeights([messages[0], *messages[2:]], timeout=60)
        held = await server.weights.GetUpdate(sync.GetUpdateRequest(update_id="u"), timeout=60)
        assert list(held.received_bytes) == [128, 4]
        assert await commit(server) == 1


@pytest.mark.asyncio
async def test_tensors_that_are_not_the_models_are_named() -> None:
    wrong = sync.TensorSpec(name="a", element_type=sync.ELEMENT_TYPE_FLOAT32, shape=[8, 4])
    async with fake_server() as server:
        code, reason, (detail,) = await refusal(
            server.weights.BeginUpdate(begin_request(tensors=[wrong]), timeout=60)
        )
        other = await server.weights.BeginUpdate(begin_request(), timeout=60)
    assert (code, reason) == ("FAILED_PRECONDITION", "TENSOR_MISMATCH")
    assert (detail.name, detail.expected, detail.received) == (
        "a",
        "float32[4, 8]",
        "float32[8, 4]",
    )
    assert other.max_chunk_bytes == 2 << 20


@pytest.mark.asyncio
async def test_one_update_at_a_time_until_its_lease_runs_out() -> None:
    async with fake_server() as server:
        await server.weights.BeginUpdate(begin_request(), timeout=60)
        second = begin_request(2, "v")
        code, reason, (detail,) = await refusal(server.weights.BeginUpdate(second, timeout=60))
        assert (code, reason) == ("ABORTED", "UPDATE_IN_PROGRESS")
        assert (detail.update_id, detail.lease_left.seconds) == ("u", 60)
        server.clock.advance(60.0)
        late = await refusal(server.weights.PushWeights(push(), timeout=60))
        assert late[:2] == ("NOT_FOUND", "UPDATE_UNKNOWN")
        await server.weights.BeginUpdate(second, timeout=60)
        await server.weights.AbortUpdate(sync.AbortUpdateRequest(update_id="v"), timeout=60)
        await server.weights.AbortUpdate(sync.AbortUpdateRequest(update_id="v"), timeout=60)
        assert (await refusal(commit(server, update_id="v")))[1] == "UPDATE_UNKNOWN"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("lease", {"lease": None}),
        ("lease", {"lease": duration_pb2.Duration(seconds=10**6)}),
        ("lease", {"lease": duration_pb2.Duration(seconds=10**17)}),
        ("tensors", {"tensors": []}),
        ("tensors[0].element_type", {"tensors": [sync.TensorSpec(name="a", shape=[1])]}),
        ("transport", {"inline": None}),
        ("update_id", {"update_id": ""}),
        ("file.crc32", {"file": sync.FileTransport(directory="x"), "inline": None}),
    ],
)
async def test_a_malformed_begin_is_named(field: str, fields: dict[str, Any]) -> None:
    async with fake_server() as server:
        request = begin_request(**fields)
        _, reason, (detail,) = await refusal(server.weights.BeginUpdate(request, timeout=60))
    assert (reason, detail.field) == ("INVALID_FIELD", field)


@pytest.mark.asyncio
async def test_files_are_read_at_begin_and_only_below_the_root(tmp_path: Path) -> None:
    (tmp_path / "weights" / "1").mkdir(parents=True)
    header = (
        b'{"a":{"dtype":"F32","shape":[4,8],"data_offsets":[0,128]},'
        b'"b":{"dtype":"F32","shape":[],"data_offsets":[128,132]}}'
    )
    path = tmp_path / "weights" / "1" / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"".join(BYTES))
    crc32 = [zlib.crc32(data) for data in BYTES]
    config = ServerConfig(weights=WeightsConfig(directory=tmp_path / "weights"))

    def request(directory: str, update_id: str, sums: list[int]) -> sync.BeginUpdateRequest:
        transport = sync.FileTransport(directory=directory, crc32=sums)
        return begin_request(1, update_id, inline=None, file=transport)

    async with fake_server(config=config) as server:
        outside = await refusal(server.weights.BeginUpdate(request("..", "x", crc32), timeout=60))
        assert outside[:2] == ("PERMISSION_DENIED", "FILE_OUTSIDE_ROOT")
        wrong = await refusal(server.weights.BeginUpdate(request("1", "y", [1, 2]), timeout=60))
        assert wrong[:2] == ("DATA_LOSS", "FILE_UNREADABLE")
        begun = await server.weights.BeginUpdate(request("1", "z", crc32), timeout=60)
        assert list(begun.received_bytes) == [128, 4]
        path.unlink()
        assert await server.weights.BeginUpdate(request("1", "z", crc32), timeout=60) == begun
        pushed = await refusal(server.weights.PushWeights(push("z"), timeout=60))
        assert pushed[:2] == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert await commit(server, update_id="z") == 1


@pytest.mark.asyncio
async def test_calls_during_a_commit_of_a_paused_server_are_turned_away_after_it() -> None:
    async with fake_server(latency_s=1.0) as server:
        call = server.generation.Generate(want(), timeout=60)
        await call.read()
        await server.control.Pause(
            srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_CONTINUE), timeout=10
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
