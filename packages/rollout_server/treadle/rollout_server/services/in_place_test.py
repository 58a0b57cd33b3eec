"""Updates in place over real gRPC, in front of the fake engine."""

import asyncio
import struct
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.config.schema import ServerConfig, WeightsConfig
from treadle.rollout_server.engine import NamedTensor
from treadle.rollout_server.errors import CapabilityMissing
from treadle.rollout_server.scheduling.lifecycle import ServerState
from treadle.rollout_server.services.testing import (
    BYTES,
    ServerHarness,
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

DRAIN = sync.IN_FLIGHT_POLICY_DRAIN
CONTINUE = sync.IN_FLIGHT_POLICY_CONTINUE
PAUSE = srv.PauseRequest(in_flight=DRAIN)
KV_CACHE = [srv.MEMORY_KIND_KV_CACHE]
WEIGHTS = [srv.MEMORY_KIND_WEIGHTS]
RESUME = srv.ResumeRequest()


def in_place(
    version: int = 1, update_id: str = "u", policy: "sync.InFlightPolicy" = DRAIN, **fields: Any
) -> sync.BeginUpdateRequest:
    return begin_request(version, update_id, in_place=sync.InPlace(in_flight=policy), **fields)


async def begin(server: ServerHarness, *arguments: Any, **fields: Any) -> sync.BeginUpdateResponse:
    response = await server.weights.BeginUpdate(in_place(*arguments, **fields), timeout=60)
    assert isinstance(response, sync.BeginUpdateResponse)
    return response


async def abort(server: ServerHarness, update_id: str = "u") -> None:
    await server.weights.AbortUpdate(sync.AbortUpdateRequest(update_id=update_id), timeout=60)


async def state_of(server: ServerHarness) -> "srv.ServerState":
    info = await server.control.GetServerInfo(srv.GetServerInfoRequest(), timeout=60)
    return info.state  # type: ignore[no-any-return]


async def staged(server: ServerHarness, version: int) -> None:
    """Commits a staged update of the same bytes."""
    await server.weights.BeginUpdate(begin_request(version, "staged"), timeout=60)
    await server.weights.PushWeights(push("staged"), timeout=60)
    assert await commit(server, update_id="staged") == version


@pytest.mark.asyncio
async def test_a_commit_whose_answer_was_lost_is_answered_again() -> None:
    async with fake_server() as server:
        await begin(server)
        await server.weights.PushWeights(push(), timeout=60)
        unset = sync.IN_FLIGHT_POLICY_UNSPECIFIED  # It is Begin's that counts.
        assert [await commit(server, unset), await commit(server, unset)] == [1, 1]


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["abort", "lease"])
async def test_without_a_commit_the_server_loads_until_another_update_commits(end: str) -> None:
    async with fake_server() as server:
        await begin(server)
        queued = asyncio.create_task(refusal(server.generate()))
        while server.replica.admission.queued == 0:
            await server.settle()
        await server.weights.PushWeights(push()[:3], timeout=60)
        if end == "abort":
            await abort(server)
        else:
            server.clock.advance(60.0)
        assert (await queued)[:2] == ("UNAVAILABLE", "PAUSED")
        assert await state_of(server) == srv.SERVER_STATE_LOADING
        with pytest.raises(grpc.aio.AioRpcError, match="an update in place ended without its"):
            await server.generate()
        for call in (
            server.control.Pause(PAUSE, timeout=60),
            server.control.Resume(RESUME, timeout=60),
        ):
            assert (await refusal(call))[1] == "STATE_CONFLICT"
        for policy in (DRAIN, sync.IN_FLIGHT_POLICY_UNSPECIFIED):
            assert (await refusal(commit(server, policy)))[1] == "UPDATE_UNKNOWN"
        await begin(server, 1, "v")
        await abort(server, "v")
        assert await state_of(server) == srv.SERVER_STATE_LOADING
        await staged(server, 1)
        assert await state_of(server) == srv.SERVER_STATE_SERVING
        healed = ids(await server.generate())
    async with fake_server() as server:
        await staged(server, 1)
        assert ids(await server.generate()) == healed


@pytest.mark.asyncio
async def test_what_continues_has_a_version_for_each_token() -> None:
    async with fake_server(latency_s=0.001) as server:
        call = server.generation.Generate(want(), timeout=60)
        await call.read()
        for _ in range(3):
            await server.tick()
        await begin(server, policy=CONTINUE)
        await server.weights.PushWeights(push(), timeout=60)
        await commit(server)
        messages = await server.ticking(read_all(call))
    chunks = [m.tokens for m in messages if m.WhichOneof("event") == "tokens"]
    assert [c.weight_version for c in chunks] == [0, 0, 1]  # The first token comes alone.
    assert sum(len(c.token_ids) for c in chunks) == 8


@pytest.mark.asyncio
async def test_a_begin_that_is_given_up_while_it_drains_is_joined_by_the_next() -> None:
    async with fake_server(latency_s=1.0) as server:
        call = server.generation.Generate(want(), timeout=60)
        await call.read()
        given_up = server.weights.BeginUpdate(in_place(), timeout=60)
        while server.replica.state is not ServerState.UPDATING:
            await server.settle()
        given_up.cancel()
        await server.ticking(begin(server), 1.0)
        await server.weights.PushWeights(push(), timeout=60)
        assert await commit(server) == 1
        assert len(ids(await read_all(call))) == 8


@pytest.mark.asyncio
async def test_an_update_that_ends_while_it_drains_changes_nothing() -> None:
    async with fake_server(latency_s=1.0) as server:
        call = server.generation.Generate(want(), timeout=60)
        await call.read()
        beginning = asyncio.create_task(refusal(begin(server)))
        while server.replica.state is not ServerState.UPDATING:
            await server.settle()
        await abort(server)
        assert (await beginning)[1] == "UPDATE_UNKNOWN"
        assert await state_of(server) == srv.SERVER_STATE_SERVING
        rest = await server.ticking(read_all(call), 1.0)
        assert {m.tokens.weight_version for m in rest[:-1]} == {0}


@pytest.mark.asyncio
async def test_a_broken_push_goes_on_where_it_broke() -> None:
    async with fake_server() as server:
        await begin(server)
        messages = push()
        corrupt = chunk(0, 100, BYTES[0][100:], crc32=1)
        broken = server.weights.PushWeights([*messages[:3], corrupt], timeout=60)
        assert (await refusal(broken))[1] == "CHUNK_CORRUPT"
        assert list((await begin(server)).received_bytes) == [100, 4]
        assert (await refusal(commit(server)))[1] == "UPDATE_INCOMPLETE"
        await server.weights.PushWeights([messages[0], messages[3]], timeout=60)
        assert await commit(server) == 1


@pytest.mark.asyncio
async def test_files_go_into_the_engine_too(tmp_path: Path) -> None:
    header = (
        b'{"a":{"dtype":"F32","shape":[4,8],"data_offsets":[0,128]},'
        b'"b":{"dtype":"F32","shape":[],"data_offsets":[128,132]}}'
    )
    (tmp_path / "w.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + b"".join(BYTES)
    )
    config = ServerConfig(weights=WeightsConfig(directory=tmp_path))
    transport = sync.FileTransport(directory=".", crc32=[zlib.crc32(data) for data in BYTES])
    wrong = sync.FileTransport(directory=".", crc32=[zlib.crc32(BYTES[0]), 1])
    async with fake_server(config=config) as server:
        refused = server.weights.BeginUpdate(in_place(1, "v", inline=None, file=wrong), timeout=60)
        assert (await refusal(refused))[1] == "FILE_UNREADABLE"
        await server.settle()
        assert server.replica.state is ServerState.LOADING
        await begin(server, inline=None, file=transport)
        assert await commit(server) == 1


@pytest.mark.asyncio
async def test_the_weights_must_be_there_and_the_cache_need_not() -> None:
    async with fake_server() as server:
        await server.control.Pause(PAUSE, timeout=60)
        release = srv.ReleaseMemoryRequest(kinds=WEIGHTS + KV_CACHE)
        await server.control.ReleaseMemory(release, timeout=60)
        assert (await refusal(begin(server)))[:2] == ("FAILED_PRECONDITION", "STATE_CONFLICT")
        await server.control.RestoreMemory(srv.RestoreMemoryRequest(kinds=WEIGHTS), timeout=60)
        await begin(server)
        await server.weights.PushWeights(push(), timeout=60)
        assert await commit(server) == 1
        await staged(server, 2)
        assert await state_of(server) == srv.SERVER_STATE_PAUSED
        await server.control.RestoreMemory(srv.RestoreMemoryRequest(kinds=KV_CACHE), timeout=60)
        await server.control.Resume(RESUME, timeout=60)
        assert {m.tokens.weight_version for m in (await server.generate())[1:-1]} == {2}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "reason", "state"),
    [
        (CapabilityMissing("fake", "float8"), "CAPABILITY_MISSING", ServerState.LOADING),
        (RuntimeError("out of memory"), "ENGINE_FAILED", ServerState.FAILED),
    ],
)
async def test_an_engine_that_does_not_take_the_tensors(
    error: Exception, reason: str, state: ServerState
) -> None:
    async with fake_server() as server:

        async def refuse(tensors: AsyncIterator[NamedTensor], **options: object) -> None:
            async for _ in tensors:
                pass
            raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.engine, "load_weights", refuse)
            await begin(server)
            await server.weights.PushWeights(push(), timeout=60)
            assert (await refusal(commit(server)))[1] == reason
        assert server.replica.state is state


@pytest.mark.asyncio
async def test_a_shutdown_does_not_wait_for_the_rest() -> None:
    async with fake_server() as server:
        await begin(server)
        await server.weights.PushWeights(push()[:3], timeout=60)
    assert server.engine.counters.running == 0
