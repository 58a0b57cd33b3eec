"""Shared memory over real gRPC, where the conformance kit cannot see."""

import asyncio
import gc
import os
import threading
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from treadle.conformance.client.shared_segment import LAST, PAGE, Part, SharedSegment
from treadle.conformance.client.stubs import stubs_for
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.engine import CollectiveGroup, InFlightPolicy
from treadle.rollout_server.scheduling.lifecycle import ServerState
from treadle.rollout_server.services.testing import (
    BYTES,
    PARAMETERS,
    ServerHarness,
    begin_request,
    chunk,
    commit,
    fake_server,
    ids,
    push,
    refusal,
)
from treadle.rollout_server.updates import incoming
from treadle.rollout_server.updates.begin import Begin
from treadle.rollout_server.updates.buckets import MappedSegment
from treadle.rollout_server.updates.files import WeightFiles
from treadle.rollout_server.updates.staging import Assembler


class Sender(SharedSegment):
    """A segment whose buckets hold parts of `BYTES`."""

    def of(self, slot: int, *parts: Part) -> sync.PushBucketsRequest:
        return self.fill(slot, BYTES, *parts)


@pytest.fixture
def sender() -> Sender:
    """Returns a segment of update "u"."""
    return Sender()


def _begin(*, in_place: bool, update_id: str = "u") -> sync.BeginUpdateRequest:
    how: dict[str, Any] = {"inline": None, "shared_memory": sync.SharedMemoryTransport()}
    if in_place:
        how["in_place"] = sync.InPlace(in_flight=sync.IN_FLIGHT_POLICY_DRAIN)
    return begin_request(update_id=update_id, **how)


async def _push(server: ServerHarness, *requests: sync.PushBucketsRequest) -> list[int]:
    """Returns the slots that were returned."""
    return [answer.slot async for answer in server.weights.PushBuckets(iter(requests), timeout=60)]


async def _until_dropped(server: ServerHarness) -> None:
    while server.replica.current_update.live is not None:
        await server.settle()


@pytest.mark.asyncio
@pytest.mark.parametrize("in_place", [False, True])
async def test_a_slot_may_be_filled_again_when_it_came_back(sender: Sender, in_place: bool) -> None:
    came_back = asyncio.Event()

    async def requests() -> AsyncIterator[sync.PushBucketsRequest]:
        yield sender.header()
        yield sender.of(1, (0, 0, 128))
        await came_back.wait()
        yield sender.of(1, (1, 0, 4))
        yield LAST

    async with fake_server() as server:
        await server.weights.BeginUpdate(_begin(in_place=in_place), timeout=60)
        slots = []
        async for answer in server.weights.PushBuckets(requests(), timeout=60):
            slots.append(answer.slot)
            came_back.set()
        assert slots == [1, 1, LAST.bucket.slot]
        assert await commit(server) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("in_place", [False, True])
async def test_a_connection_that_ends_before_the_last_bucket_ends_the_update(
    sender: Sender, in_place: bool
) -> None:
    async with fake_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        await server.weights.BeginUpdate(_begin(in_place=in_place), timeout=60)
        stream = stubs_for(channel).weights.PushBuckets(timeout=60)
        await stream.write(sender.header())
        await stream.write(sender.of(0, (0, 0, 128)))
        assert (await stream.read()).slot == 0
        await channel.close()
        await _until_dropped(server)
        assert (await refusal(commit(server)))[1] == "UPDATE_UNKNOWN"
        await server.weights.AbortUpdate(sync.AbortUpdateRequest(update_id="u"), timeout=60)
        assert server.replica.state is (ServerState.LOADING if in_place else ServerState.SERVING)
        again = Sender("v")
        await server.weights.BeginUpdate(_begin(in_place=False, update_id="v"), timeout=60)
        await _push(server, again.header(), again.of(0, (0, 0, 128), (1, 0, 4)), LAST)
        assert await commit(server, update_id="v") == 1
        assert server.replica.state is ServerState.SERVING


@pytest.mark.asyncio
@pytest.mark.parametrize("splits", [False, True])
async def test_in_place_parts_may_be_less_than_tensors_where_begin_says_so(
    sender: Sender, splits: bool
) -> None:
    async with fake_server() as server:
        capabilities = replace(server.engine.info.capabilities, split_tensors=splits)
        server.engine.info = replace(server.engine.info, capabilities=capabilities)
        begun = await server.weights.BeginUpdate(_begin(in_place=True), timeout=60)
        assert begun.split_tensors is splits
        push = _push(server, sender.header(), sender.of(0, (0, 0, 100)), LAST)
        if splits:
            assert await push == [0, LAST.bucket.slot]
        else:
            code, reason, (detail,) = await refusal(push)
            assert (code, reason, detail.field) == ("INVALID_ARGUMENT", "INVALID_FIELD", "length")


@pytest.mark.asyncio
async def test_bytes_of_a_tensor_may_arrive_by_both_transports(sender: Sender) -> None:
    async with fake_server() as server:
        await server.weights.BeginUpdate(begin_request(), timeout=60)
        await server.weights.PushWeights(push(), timeout=60)
        await commit(server)
        wanted = ids(await server.generate())
    async with fake_server() as server:
        await server.weights.BeginUpdate(_begin(in_place=True), timeout=60)
        await _push(server, sender.header(), sender.of(0, (0, 0, 30)), LAST)
        chunks = [push()[0], chunk(0, 30, BYTES[0][30:61]), chunk(1, 0, BYTES[1])]
        await server.weights.PushWeights(chunks, timeout=60)
        await _push(server, sender.header(), sender.of(1, (0, 61, 67)), LAST)
        assert await commit(server) == 1
        assert ids(await server.generate()) == wanted


@pytest.mark.asyncio
async def test_bytes_that_two_streams_bring_at_once_count_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = threading.Barrier(2, timeout=60)
    write = Assembler.write

    def meet(*arguments: Any) -> None:
        write(*arguments)
        both.wait()

    monkeypatch.setattr(incoming, "_SHORT_BYTES", 0)
    monkeypatch.setattr(Assembler, "write", meet)
    senders = [Sender(), Sender()]
    async with fake_server() as server:
        await server.weights.BeginUpdate(_begin(in_place=False), timeout=60)
        pushes = (_push(server, each.header(), each.of(0, (0, 0, 64)), LAST) for each in senders)
        results = await asyncio.gather(*pushes, return_exceptions=True)
        assert any(isinstance(result, grpc.RpcError) for result in results)
        assert (await refusal(commit(server)))[1] == "UPDATE_UNKNOWN"


GROUP = CollectiveGroup(
    backend="gloo",
    rendezvous="127.0.0.1:1",
    group_name="g",
    world_size=2,
    first_rank=1,
    bucket_bytes=64,
    senders=(0, 0),
)
FILES = WeightFiles(directory="1", crc32=(1, 2))


@pytest.mark.asyncio
@pytest.mark.parametrize("source", [GROUP, FILES])
async def test_an_update_from_files_or_a_group_takes_no_buckets(
    sender: Sender, source: CollectiveGroup | WeightFiles
) -> None:
    async with fake_server() as server:
        begin = Begin(
            update_id="u",
            weight_version=1,
            tensors=PARAMETERS,
            lease_s=60,
            in_place=InFlightPolicy.DRAIN,
            source=source,
        )
        update = server.replica.current_update.begin(begin)
        bucket = sender.of(0, (0, 0, 128))
        assert (await refusal(_push(server, sender.header(), bucket)))[1] == "INVALID_FIELD"
        assert update.state.ended


@pytest.mark.asyncio
async def test_a_delta_comes_in_buckets_too() -> None:
    changed = BYTES[0][:4] + b"new!" + BYTES[0][8:]
    encoded = (1).to_bytes(8, "little") + (1).to_bytes(4, "little") + b"new!"
    async with fake_server() as server:
        await server.weights.BeginUpdate(begin_request(keep_base=True), timeout=60)
        await server.weights.PushWeights(push(), timeout=60)
        await commit(server)
        before = ids(await server.generate())
        delta = sync.DeltaEncoding(
            base_weight_version=1,
            encoded_bytes=[len(encoded), 0],
            crc32=[zlib.crc32(changed), zlib.crc32(BYTES[1])],
        )
        shared = {"inline": None, "shared_memory": sync.SharedMemoryTransport()}
        sender = Sender("d")
        await server.weights.BeginUpdate(begin_request(2, "d", delta=delta, **shared), timeout=60)
        halves = [sync.PushBucketsRequest(bucket=sync.Bucket(slot=slot)) for slot in (0, 1)]
        for slot, (start, stop) in enumerate([(0, 10), (10, len(encoded))]):
            place = PAGE * (1 + slot)
            os.pwrite(sender.fd, encoded[start:stop], place)
            halves[slot].bucket.parts.add(
                tensor_index=0, offset=start, length=stop - start, start=place
            )
        assert await _push(server, sender.header(), *halves, LAST) == [0, 1, LAST.bucket.slot]
        assert await commit(server, update_id="d") == 2
        assert ids(await server.generate()) != before


def _open_segments() -> int:
    return sum(isinstance(thing, MappedSegment) for thing in gc.get_objects())


@pytest.mark.asyncio
@pytest.mark.parametrize("in_place", [False, True])
async def test_a_refused_push_keeps_no_descriptor_until_the_collector_comes(in_place: bool) -> None:
    async with fake_server() as server:
        gc.collect()
        gc.disable()
        try:
            for i in range(4):
                sender = Sender(f"u{i}")
                begin = _begin(in_place=in_place, update_id=f"u{i}")
                await server.weights.BeginUpdate(begin, timeout=60)
                header = sender.header(**{"num_bytes": 1 << 40} if i % 2 else {})
                twice = sender.of(1, (0, 0, 128), (0, 0, 128))
                await refusal(_push(server, header, twice))
            async with asyncio.timeout(60):
                while _open_segments():
                    await server.settle()
        finally:
            gc.enable()
