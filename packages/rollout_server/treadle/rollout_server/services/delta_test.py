"""Updates by delta over real gRPC, in front of the fake engine."""

import zlib
from typing import Any

import pytest

from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.errors import CapabilityMissing
from treadle.rollout_server.services.testing import (
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


async def whole(server: ServerHarness, version: int) -> None:
    """Commits the weights that the delta leads to, pushed whole."""
    await server.weights.BeginUpdate(begin_request(version, "w"), timeout=60)
    header = sync.PushWeightsRequest(header=sync.PushHeader(update_id="w"))
    chunks = [header, chunk(0, 0, CHANGED), chunk(1, 0, BYTES[1])]
    await server.weights.PushWeights(chunks, timeout=60)
    assert await commit(server, update_id="w") == version


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
