# ruff: noqa: D102  (a check's name says what it shows)
"""Updates by the memory of a sender on the server's host, which the kit is here."""

from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from treadle.conformance.checks.server_harness import CALL_S, SHARED, Bench, Checks
from treadle.conformance.client.refusals import refusal
from treadle.conformance.client.shared_segment import (
    LAST,
    PAGE,
    SharedSegment,
    whole_tensors,
)
from treadle.rollout.v1 import errors_pb2
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync

_IN_PLACE = SHARED | {"in_place": sync.InPlace(in_flight=sync.IN_FLIGHT_POLICY_DRAIN)}
_WAYS = pytest.mark.parametrize("way", [SHARED, _IN_PLACE], ids=["staged", "in place"])
_Way = dict[str, Any]


@pytest.mark.asyncio
class CheckSharedMemory(Checks):
    """PushBuckets."""

    async def _begin(self, it: Bench, way: _Way = SHARED) -> str:
        """Opens an update, where all that it needs is there."""
        await it.need_shared_memory()
        if way is _IN_PLACE and not it.can.in_place_update:
            pytest.skip("it takes no updates in place")
        update_id, _ = await it.begin(**way)
        return update_id

    @_WAYS
    @pytest.mark.parametrize("num_slots", [1, 2])
    async def test_it_brings_what_inline_brings(self, way: _Way, num_slots: int) -> None:
        """Slots are overwritten as soon as they are given back, and before the commit."""
        async with self.bench() as it:
            wanted, first = await it.after(1), await it.after(0)
            data = [tensor.data for tensor in it.tensors(1)]
            update_id = await self._begin(it, way)
            await it.share(update_id, data, num_slots=num_slots)
            assert await it.commit(update_id) == it.server.weight_version + 1
            assert (await it.info()).state == srv.SERVER_STATE_SERVING
            assert await it.sampled() == wanted
        assert first != wanted, "both sets of weights give the same completion"

    @_WAYS
    async def test_tensors_may_be_cut_and_mixed_in_buckets(self, way: _Way) -> None:
        async with self.bench() as it:
            wanted, _ = await it.after(1), await it.bring(0)
            data = [tensor.data for tensor in it.tensors(1)]
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
            update_id = await self._begin(it, way)
            _, again = await it.begin(update_id=update_id, **way)
            if way is _IN_PLACE and not again.split_tensors:
                pytest.skip("in place it takes whole tensors only")
            await it.share(update_id, data, buckets)
            assert await it.commit(update_id) == it.server.weight_version + 1
            assert await it.sampled() == wanted

    @_WAYS
    @pytest.mark.parametrize("how", ["cancelled", "finished"])
    async def test_a_stream_without_its_last_bucket_ends_the_update(
        self, way: _Way, how: str
    ) -> None:
        async with self.bench() as it:
            before = await it.sampled()
            data = [tensor.data for tensor in it.tensors(1)]
            update_id = await self._begin(it, way)
            room = max(len(part) for part in data)
            segment = SharedSegment(update_id, slot_bytes=room)
            stream = it.stubs.weights.PushBuckets(timeout=CALL_S)
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
            await self._is_gone(it, update_id, way, before)

    async def _is_gone(self, it: Bench, update_id: str, way: _Way, before: object) -> None:
        """The update has ended, another one may begin, and nothing of it serves."""
        # To hear that a caller is gone may take a server a moment.
        for _ in range(1000):
            try:
                await it.held(update_id)
            except grpc.aio.AioRpcError:
                break
        gone = await refusal(it.commit(update_id))
        assert (gone.code, gone.reason) == ("NOT_FOUND", "UPDATE_UNKNOWN")
        if way is SHARED:
            assert (await it.info()).state == srv.SERVER_STATE_SERVING
            assert await it.sampled() == before
            return
        for _ in range(1000):
            if (await it.info()).state != srv.SERVER_STATE_UPDATING:
                break
        if it.server.state == srv.SERVER_STATE_LOADING:
            assert (await it.refused()).reason == "PAUSED"
        else:
            assert await it.sampled() == before
        await it.bring(0)

    @pytest.mark.parametrize("wrong", ["name", "seal", "update", "descriptor", "length"])
    async def test_a_segment_that_is_no_senders_is_refused(self, wrong: str) -> None:
        async with self.bench() as it:
            before = await it.sampled()
            update_id = await self._begin(it)
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
            found = await refusal(it.bucket_answer(segment.header(**fields)))
            await self._is_gone(it, update_id, SHARED, before)
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
        async with self.bench() as it:
            before = await it.sampled()
            size = len(it.tensors()[0].data)
            update_id = await self._begin(it, way)
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
            found = await refusal(it.bucket_answer(segment.header(), bucket))
            await self._is_gone(it, update_id, way, before)
        assert found.reason == ("CHUNK_OUT_OF_ORDER" if wrong == "ahead" else "INVALID_FIELD")

    async def test_a_stream_is_a_header_and_then_buckets(self) -> None:
        async with self.bench() as it:
            for headers in (0, 2):
                segment = SharedSegment(await self._begin(it))
                messages = [segment.header()] * headers or [LAST]
                found = await refusal(it.bucket_answer(*messages))
                assert (found.code, found.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
                assert found.detail(errors_pb2.InvalidField).field == "payload"
                with suppress(grpc.aio.AioRpcError):  # An error of the stream ends the update.
                    await it.abort(segment.update_id)
            found = await refusal(it.bucket_answer(segment.header()))
        assert (found.code, found.reason) == ("NOT_FOUND", "UPDATE_UNKNOWN")

    async def test_it_is_refused_without_the_capability(self) -> None:
        async with self.bench() as it:
            if it.can.shared_memory_transport:
                pytest.skip("it reads shared memory")
            _, found = await it.refused_begin(**SHARED)
        assert (found.code, found.reason) == ("UNIMPLEMENTED", "CAPABILITY_MISSING")


def _cut(length: int, most: int) -> list[tuple[int, int]]:
    """Offsets and lengths of pieces."""
    return [(at, min(most, length - at)) for at in range(0, length, most)]


async def _to_its_end(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass
