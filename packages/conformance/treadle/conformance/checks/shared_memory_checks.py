# ruff: noqa: D102  (a check's name says what it shows)
"""Updates by shared memory; the kit is the sender, on the server's host."""

from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from treadle.conformance.client.refusals import refusal
from treadle.conformance.client.shared_segment import (
    LAST,
    PAGE,
    SharedSegment,
    whole_tensors,
)
from treadle.conformance.server_harness import CALL_S, SHARED, Checks, ServerHarness
from treadle.rollout.v1 import errors_pb2
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync

_IN_PLACE = SHARED | {"in_place": sync.InPlace(in_flight=sync.IN_FLIGHT_POLICY_DRAIN)}
_WAYS = pytest.mark.parametrize("way", [SHARED, _IN_PLACE], ids=["staged", "in place"])
_Way = dict[str, Any]


@pytest.mark.asyncio
class CheckSharedMemory(Checks):
    """PushBuckets."""

    async def _begin(self, server: ServerHarness, way: _Way = SHARED) -> str:
        """Begins an update, or skips the check if the server cannot take it."""
        await server.require_shared_memory()
        if way is _IN_PLACE and not server.capabilities.in_place_update:
            pytest.skip("the server takes no updates in place")
        update_id, _ = await server.begin(**way)
        return update_id

    @_WAYS
    @pytest.mark.parametrize("num_slots", [1, 2])
    async def test_it_brings_what_inline_brings(self, way: _Way, num_slots: int) -> None:
        """The kit overwrites slots as soon as they are given back, before the commit."""
        async with self.connect() as server:
            wanted, first = await server.update_and_sample(1), await server.update_and_sample(0)
            data = [tensor.data for tensor in server.tensors(1)]
            update_id = await self._begin(server, way)
            await server.push_shared_memory(update_id, data, num_slots=num_slots)
            assert await server.commit(update_id) == server.info.weight_version + 1
            assert (await server.refresh()).state == srv.SERVER_STATE_SERVING
            assert await server.sample() == wanted
        assert first != wanted, "both sets of weights give the same completion"

    @_WAYS
    async def test_tensors_may_be_cut_and_mixed_in_buckets(self, way: _Way) -> None:
        async with self.connect() as server:
            wanted, _ = await server.update_and_sample(1), await server.update(0)
            data = [tensor.data for tensor in server.tensors(1)]
            begins = [(index, 0, len(part) // 3) for index, part in enumerate(data)]
            ends = [(index, cut, len(data[index]) - cut) for index, _, cut in begins]
            room = max(len(part) for part in data)
            pieces = [
                (index, offset + start, length)
                for parts in (begins, ends[::-1])
                for index, offset, length in parts
                for start, length in _cut(length, room // 2)
            ]
            buckets = [pieces[at : at + 2] for at in range(0, len(pieces), 2)]
            update_id = await self._begin(server, way)
            _, again = await server.begin(update_id=update_id, **way)
            if way is _IN_PLACE and not again.split_tensors:
                pytest.skip("in place the server takes only whole tensors")
            await server.push_shared_memory(update_id, data, buckets)
            assert await server.commit(update_id) == server.info.weight_version + 1
            assert await server.sample() == wanted

    @_WAYS
    @pytest.mark.parametrize("how", ["cancelled", "finished"])
    async def test_a_stream_without_its_last_bucket_ends_the_update(
        self, way: _Way, how: str
    ) -> None:
        async with self.connect() as server:
            before = await server.sample()
            data = [tensor.data for tensor in server.tensors(1)]
            update_id = await self._begin(server, way)
            room = max(len(part) for part in data)
            segment = SharedSegment(update_id, slot_bytes=room)
            stream = server.stubs.weights.PushBuckets(timeout=CALL_S)
            await stream.write(segment.header())
            for slot, parts in enumerate(whole_tensors(data, room)[:1]):
                await stream.write(segment.fill(slot, data, *parts))
                assert (await stream.read()).slot == slot
            if how == "cancelled":
                stream.cancel()
            else:
                await stream.done_writing()
                ended = await refusal(_to_its_end(stream))
                assert ended.reason == "INVALID_FIELD"
            await self._is_gone(server, update_id, way, before)

    async def _is_gone(
        self, server: ServerHarness, update_id: str, way: _Way, before: object
    ) -> None:
        """Checks that the update has ended, its weights do not serve, and another may begin."""
        # The server may take a moment to notice that the caller is gone.
        for _ in range(1000):
            try:
                await server.received_bytes(update_id)
            except grpc.aio.AioRpcError:
                break
        gone = await refusal(server.commit(update_id))
        assert (gone.code, gone.reason) == ("NOT_FOUND", "UPDATE_UNKNOWN")
        if way is SHARED:
            assert (await server.refresh()).state == srv.SERVER_STATE_SERVING
            assert await server.sample() == before
            return
        for _ in range(1000):
            if (await server.refresh()).state != srv.SERVER_STATE_UPDATING:
                break
        if server.info.state == srv.SERVER_STATE_LOADING:
            assert (await server.refused_generate()).reason == "PAUSED"
        else:
            assert await server.sample() == before
        await server.update(0)

    @pytest.mark.parametrize("wrong", ["name", "seal", "update", "descriptor", "length"])
    async def test_a_segment_that_is_no_senders_is_refused(self, wrong: str) -> None:
        async with self.connect() as server:
            before = await server.sample()
            update_id = await self._begin(server)
            segment = SharedSegment(
                "another" if wrong == "update" else update_id,
                name="somebody-elses" if wrong == "name" else "treadle-test",
                sealed=wrong != "seal",
            )
            fields: dict[str, Any] = {"update_id": update_id}
            if wrong == "descriptor":
                fields["fd"] = 1 << 20
            if wrong == "length":
                fields["num_bytes"] = segment.num_bytes + PAGE
            found = await refusal(server.read_bucket_response(segment.header(**fields)))
            await self._is_gone(server, update_id, SHARED, before)
        assert (found.code, found.reason) == ("UNIMPLEMENTED", "CAPABILITY_MISSING")

    @_WAYS
    @pytest.mark.parametrize(
        "wrong",
        [
            *("in the first page", "beyond the segment", "beyond the tensor", "of no tensor"),
            *("empty", "ahead"),
        ],
    )
    async def test_a_part_that_has_no_place_ends_the_update(self, wrong: str, way: _Way) -> None:
        async with self.connect() as server:
            before = await server.sample()
            size = len(server.tensors()[0].data)
            update_id = await self._begin(server, way)
            segment = SharedSegment(update_id, slot_bytes=size + PAGE)
            part = sync.BucketPart(tensor_index=0, offset=0, length=size, start=PAGE)
            match wrong:
                case "in the first page":
                    part.start = PAGE - 1
                case "beyond the segment":
                    part.start = segment.num_bytes - size + 1
                case "beyond the tensor":
                    part.length = size + 1
                case "of no tensor":
                    part.tensor_index = 1 << 20
                case "empty":
                    part.length = 0
                case _:
                    part.offset = 1
            bucket = sync.PushBucketsRequest(bucket=sync.Bucket(slot=0, parts=[part]))
            found = await refusal(server.read_bucket_response(segment.header(), bucket))
            await self._is_gone(server, update_id, way, before)
        assert found.reason == ("CHUNK_OUT_OF_ORDER" if wrong == "ahead" else "INVALID_FIELD")

    async def test_a_stream_is_a_header_and_then_buckets(self) -> None:
        async with self.connect() as server:
            for headers in (0, 2):
                segment = SharedSegment(await self._begin(server))
                messages = [segment.header()] * headers or [LAST]
                found = await refusal(server.read_bucket_response(*messages))
                assert (found.code, found.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
                assert found.detail(errors_pb2.InvalidField).field == "payload"
                with suppress(grpc.aio.AioRpcError):  # An error of the stream ends the update.
                    await server.abort(segment.update_id)
            found = await refusal(server.read_bucket_response(segment.header()))
        assert (found.code, found.reason) == ("NOT_FOUND", "UPDATE_UNKNOWN")

    async def test_it_is_refused_without_the_capability(self) -> None:
        async with self.connect() as server:
            if server.capabilities.shared_memory_transport:
                pytest.skip("the server reads shared memory")
            _, found = await server.refused_begin(**SHARED)
        assert (found.code, found.reason) == ("UNIMPLEMENTED", "CAPABILITY_MISSING")


def _cut(length: int, most: int) -> list[tuple[int, int]]:
    """Returns the offsets and lengths of pieces of at most `most` bytes."""
    return [(at, min(most, length - at)) for at in range(0, length, most)]


async def _to_its_end(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass
