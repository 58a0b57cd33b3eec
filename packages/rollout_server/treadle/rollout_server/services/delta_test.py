"""Updates by delta over real gRPC, in front of the fake engine."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.config.schema import ServerConfig, WeightsConfig
from treadle.rollout_server.errors import CapabilityMissing
from treadle.rollout_server.services.conftest import (
    BYTES,
    ServerHarness,
    begin_request,
    chunk,
    commit,
    fake_server,
    ids,
    push,
    refusal,
)

CHANGED = BYTES[0][:4] + b"new!" + BYTES[0][8:]
ENCODED = (1).to_bytes(8, "little") + (1).to_bytes(4, "little") + b"new!"


def delta(base: int = 1, crc32: int | None = None, **fields: Any) -> sync.DeltaEncoding:
    values: dict[str, Any] = {
        "encoded_bytes": [len(ENCODED), 0],
        "crc32": [zlib.crc32(CHANGED) if crc32 is None else crc32, zlib.crc32(BYTES[1])],
    }
    return sync.DeltaEncoding(base_weight_version=base, **values | fields)


async def full(server: ServerHarness, version: int, *, keep_base: bool = True) -> None:
    request = begin_request(version, f"full{version}", keep_base=keep_base)
    await server.weights.BeginUpdate(request, timeout=60)
    await server.weights.PushWeights(push(f"full{version}"), timeout=60)
    assert await commit(server, update_id=f"full{version}") == version


async def push_delta(
    server: ServerHarness, version: int, update_id: str = "d", **fields: Any
) -> None:
    request = begin_request(version, update_id, delta=delta(**fields))
    await server.weights.BeginUpdate(request, timeout=60)
    header = sync.PushWeightsRequest(header=sync.PushHeader(update_id=update_id))
    await server.weights.PushWeights([header, chunk(0, 0, ENCODED)], timeout=60)


def write_delta(folder: Path, *, encoded: bytes = ENCODED, base: int = 1) -> None:
    size = len(encoded)
    header = {
        "__metadata__": {"base_weight_version": str(base)},
        "a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
        "b": {"dtype": "U8", "shape": [0], "data_offsets": [size, size]},
    }
    text = json.dumps(header).encode()
    folder.mkdir()
    path = folder / "rank-0.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + encoded)


async def whole(server: ServerHarness, version: int) -> None:
    """The weights that the delta leads to, pushed whole."""
    await server.weights.BeginUpdate(begin_request(version, "w"), timeout=60)
    header = sync.PushWeightsRequest(header=sync.PushHeader(update_id="w"))
    chunks = [header, chunk(0, 0, CHANGED), chunk(1, 0, BYTES[1])]
    await server.weights.PushWeights(chunks, timeout=60)
    assert await commit(server, update_id="w") == version


@pytest.mark.asyncio
async def test_a_delta_brings_what_the_whole_brings_and_can_be_followed() -> None:
    async with fake_server() as server:
        info = await server.control.GetServerInfo(srv.GetServerInfoRequest(), timeout=60)
        assert info.capabilities.delta_encoding
        await whole(server, 2)
        wanted = ids(await server.generate())
    async with fake_server() as server:
        await full(server, 1)
        await push_delta(server, 2)
        assert await commit(server, update_id="d") == 2
        assert ids(await server.generate()) == wanted
        same = delta(2, encoded_bytes=[0, 0])
        await server.weights.BeginUpdate(begin_request(3, "e", delta=same), timeout=60)
        assert await commit(server, update_id="e") == 3
        assert ids(await server.generate()) == wanted


@pytest.mark.asyncio
async def test_a_delta_in_files_is_read_at_begin_and_one_that_is_damaged_leaves_the_base(
    tmp_path: Path,
) -> None:
    config = ServerConfig(weights=WeightsConfig(directory=tmp_path))
    write_delta(tmp_path / "damaged", encoded=ENCODED[:-1] + b"?")
    write_delta(tmp_path / "cut", encoded=ENCODED[:-1])
    write_delta(tmp_path / "other", base=7)
    write_delta(tmp_path / "good")
    async with fake_server(config=config) as server:
        await full(server, 1)

        async def begin(directory: str) -> sync.BeginUpdateResponse:
            crc32 = [zlib.crc32(ENCODED), 0]
            file = sync.FileTransport(directory=directory, crc32=crc32)
            request = begin_request(2, directory, inline=None, file=file, delta=delta())
            return await server.weights.BeginUpdate(request, timeout=60)  # type: ignore[no-any-return]

        for directory in ("damaged", "cut", "other"):
            code, reason, _ = await refusal(begin(directory))
            assert (code, reason) == ("DATA_LOSS", "FILE_UNREADABLE"), directory
        assert list((await begin("good")).received_bytes) == [len(ENCODED), 0]
        assert await commit(server, update_id="good") == 2
        by_file = ids(await server.generate())
    async with fake_server() as server:
        await whole(server, 2)
        assert ids(await server.generate()) == by_file


@pytest.mark.asyncio
async def test_a_base_that_is_not_held_is_refused_with_the_one_that_is() -> None:
    async with fake_server() as server:
        code, reason, (detail,) = await refusal(push_delta(server, 2))
        assert (code, reason) == ("FAILED_PRECONDITION", "DELTA_BASE_MISMATCH")
        assert (detail.held, detail.wanted) == (0, 1)
        await full(server, 1)
        _, _, (detail,) = await refusal(push_delta(server, 4, base=3))
        assert (detail.held, detail.wanted) == (1, 3)
        await full(server, 2, keep_base=False)
        _, _, (detail,) = await refusal(push_delta(server, 4, base=2))
        assert detail.held == 0


@pytest.mark.asyncio
async def test_a_delta_that_leads_elsewhere_ends_and_takes_the_base_with_it() -> None:
    async with fake_server() as server:
        await full(server, 1)
        before = ids(await server.generate())
        await push_delta(server, 2, crc32=1)
        code, reason, (detail,) = await refusal(commit(server, update_id="d"))
        assert (code, reason) == ("FAILED_PRECONDITION", "DELTA_BASE_MISMATCH")
        assert (detail.held, detail.wanted) == (0, 1)
        assert ids(await server.generate()) == before
        assert (await refusal(push_delta(server, 2, "e")))[1] == "DELTA_BASE_MISMATCH"
        await full(server, 2)


@pytest.mark.asyncio
async def test_an_engine_that_refuses_leaves_the_base_as_it_was() -> None:
    async with fake_server() as server:
        await full(server, 1)
        await push_delta(server, 2)

        async def refuse(*_: object, **__: object) -> None:
            raise CapabilityMissing("fake", "float8")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.engine, "load_weights", refuse)
            assert (await refusal(commit(server, update_id="d")))[1] == "CAPABILITY_MISSING"
        assert await commit(server, update_id="d") == 2
        after = ids(await server.generate())
    async with fake_server() as server:
        await whole(server, 2)
        assert ids(await server.generate()) == after


@pytest.mark.asyncio
async def test_a_delta_that_is_given_up_leaves_the_base() -> None:
    async with fake_server() as server:
        await full(server, 1)
        await push_delta(server, 2)
        await server.weights.AbortUpdate(sync.AbortUpdateRequest(update_id="d"), timeout=60)
        await push_delta(server, 2, "e")
        assert await commit(server, update_id="e") == 2


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("delta.base_weight_version", {"delta": delta(0)}),
        ("delta.encoded_bytes", {"delta": delta(encoded_bytes=[0])}),
        ("delta.encoded_bytes[1]", {"delta": delta(encoded_bytes=[0, 9])}),
        ("delta.crc32", {"delta": sync.DeltaEncoding(base_weight_version=1, encoded_bytes=[0, 0])}),
        (
            "in_place",
            {"delta": delta(), "in_place": sync.InPlace(in_flight=sync.IN_FLIGHT_POLICY_DRAIN)},
        ),
        (
            "in_place",
            {"keep_base": True, "in_place": sync.InPlace(in_flight=sync.IN_FLIGHT_POLICY_DRAIN)},
        ),
        ("file.crc32", {"delta": delta(), "inline": None, "file": sync.FileTransport()}),
    ],
)
async def test_a_malformed_delta_is_named(field: str, fields: dict[str, Any]) -> None:
    async with fake_server() as server:
        request = begin_request(1, **fields)
        _, reason, (detail,) = await refusal(server.weights.BeginUpdate(request, timeout=60))
    assert (reason, detail.field) == ("INVALID_FIELD", field)
