# ruff: noqa: D102  (a check's name says what it shows)
"""Weight updates, message by message: leases, chunks, commits and interruptions."""

import asyncio
import uuid
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import duration_pb2

from treadle.conformance.client.refusals import refusal
from treadle.conformance.contracts.reader import TRIES
from treadle.conformance.server_harness import (
    CALL_S,
    Checks,
    ServerHarness,
    chunk_of,
    remaining_messages,
    token_ids_of,
)
from treadle.rollout.v1 import errors_pb2
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.engine import NamedTensor

_UNNAMED = sync.TensorSpec(name="x", shape=[1])
_FILE = sync.FileTransport(directory="..")
_INVALID: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("lease unset", "lease", {"lease": None}),
    ("lease 0", "lease", {"lease": duration_pb2.Duration()}),
    ("tensors empty", "tensors", {"tensors": None}),
    ("element type unspecified", "tensors[0].element_type", {"tensors": [_UNNAMED]}),
    ("transport unset", "transport", {"inline": None}),
    ("update_id empty", "update_id", {"update_id": ""}),
    ("update_id of 129 bytes", "update_id", {"update_id": "x" * 129}),
    ("in_place without policy", "in_place.in_flight", {"in_place": sync.InPlace()}),
    ("file without checksums", "file.crc32", {"inline": None, "file": _FILE}),
)
_PART = 64


@pytest.mark.asyncio
class CheckBegin(Checks):
    """BeginUpdate, its lease, and AbortUpdate."""

    @pytest.mark.parametrize(
        ("field", "fields"), [row[1:] for row in _INVALID], ids=[row[0] for row in _INVALID]
    )
    async def test_a_malformed_begin_is_named(self, field: str, fields: dict[str, Any]) -> None:
        async with self.connect() as server:
            if "file" in fields and not server.capabilities.file_transport:
                pytest.skip("the server reads no files")
            if "in_place" in fields and not server.capabilities.in_place_update:
                pytest.skip("the server takes no updates in place")
            _, found = await server.refused_begin(**fields)
        assert (found.code, found.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert found.detail(errors_pb2.InvalidField).field == field

    async def test_begin_is_idempotent_and_tells_what_is_held(self) -> None:
        async with self.connect() as server:
            tensors = server.tensors()
            update_id, begun = await server.begin()
            assert list(begun.received_bytes) == [0] * len(tensors)
            assert begun.max_chunk_bytes > 0
            length = min(_PART, len(tensors[0].data))
            await server.push_chunks(update_id, chunk_of(tensors, 0, 0, length))
            _, again = await server.begin(update_id=update_id)
        assert list(again.received_bytes) == [length] + [0] * (len(tensors) - 1)

    async def test_another_update_is_turned_away_until_the_first_ends(self) -> None:
        async with self.connect() as server:
            first, _ = await server.begin()
            _, found = await server.refused_begin()
            await server.abort(first)
            await server.abort(first)
            await server.begin()
        assert (found.code, found.reason) == ("ABORTED", "UPDATE_IN_PROGRESS")
        detail = found.detail(errors_pb2.UpdateInProgress)
        assert detail.update_id == first
        assert 0 < detail.lease_left.ToTimedelta().total_seconds() <= 300

    async def test_a_lease_that_runs_out_frees_the_server(self) -> None:
        async with self.connect() as server:
            first, _ = await server.begin(lease=duration_pb2.Duration(nanos=500_000_000))
            for _ in range(100):
                left_s = await self._lease_left_s(server)
                if left_s is None:
                    break
                await asyncio.sleep(
                    left_s
                )  # Real time, because the lease runs on the server's clock.
            else:
                pytest.fail("a lease of 0.5 s does not expire")
            late = await refusal(server.received_bytes(first))
        assert (late.code, late.reason) == ("NOT_FOUND", "UPDATE_UNKNOWN")

    @pytest.mark.parametrize("call", ["GetUpdate", "PushWeights"])
    async def test_a_lease_is_renewed(self, call: str) -> None:
        async with self.connect() as server:
            tensors = server.tensors()
            first, _ = await server.begin()
            for offset in range(TRIES):  # A slow machine may hide one renewal.
                begun = left = await self._lease_left_s(server) or 0
                while begun - left < 0.1:
                    left = await self._lease_left_s(server) or 0
                if call == "GetUpdate":
                    await server.received_bytes(first)
                else:
                    await server.push_chunks(first, chunk_of(tensors, 0, offset, 1))
                renewed = await self._lease_left_s(server) or 0
                if renewed > left:
                    break
        assert renewed > left

    async def _lease_left_s(self, server: ServerHarness) -> float | None:
        request = server.begin_request()
        try:
            found = await refusal(server.stubs.weights.BeginUpdate(request, timeout=CALL_S))
        except AssertionError:  # It succeeded, so the first update is gone.
            await server.abort(request.update_id)
            return None
        detail = found.detail(errors_pb2.UpdateInProgress)
        return float(detail.lease_left.ToTimedelta().total_seconds())

    async def test_a_version_that_is_not_newer_is_refused(self) -> None:
        async with self.connect() as server:
            serving = server.info.weight_version
            _, found = await server.refused_begin(weight_version=serving)
        assert (found.code, found.reason) == ("FAILED_PRECONDITION", "WEIGHT_VERSION_BEHIND")
        assert found.detail(errors_pb2.WeightVersionBehind).serving == serving

    async def test_tensors_that_are_not_the_models_are_named(self) -> None:
        async with self.connect() as server:
            wrong = list(server.begin_request().tensors)
            wrong[0].shape.append(7)
            _, found = await server.refused_begin(tensors=wrong)
        assert (found.code, found.reason) == ("FAILED_PRECONDITION", "TENSOR_MISMATCH")
        detail = found.detail(errors_pb2.TensorMismatch)
        assert detail.name == wrong[0].name and detail.expected and detail.received

    @pytest.mark.parametrize("call", ["push", "held", "commit", "abort"])
    async def test_an_unknown_update_is_not_found(self, call: str) -> None:
        async with self.connect() as server:
            unknown = f"conformance-{uuid.uuid4()}"
            calls: dict[str, Callable[[str], Awaitable[object]]] = {
                "push": server.push_chunks,
                "held": server.received_bytes,
                "commit": server.commit,
                "abort": server.abort,
            }
            found = await refusal(calls[call](unknown))
        assert (found.code, found.reason) == ("NOT_FOUND", "UPDATE_UNKNOWN")

    async def test_files_outside_the_servers_directory_are_not_read(self) -> None:
        async with self.connect() as server:
            crc32 = [0] * len(server.tensors())
            transport = sync.FileTransport(directory="../..", crc32=crc32)
            _, found = await server.refused_begin(inline=None, file=transport)
        right = [("PERMISSION_DENIED", "FILE_OUTSIDE_ROOT")]
        if not server.capabilities.file_transport:  # Then the server has no directory.
            right.append(("UNIMPLEMENTED", "CAPABILITY_MISSING"))
        assert (found.code, found.reason) in right


@pytest.mark.asyncio
class CheckPush(Checks):
    """PushWeights: which chunks are accepted."""

    async def test_a_corrupt_chunk_is_refused_and_nothing_of_it_kept(self) -> None:
        async with self.connect() as server:
            tensors = server.tensors()
            update_id, _ = await server.begin()
            length = min(_PART, len(tensors[0].data))
            corrupt = chunk_of(tensors, 0, 0, length, crc32=1)
            found = await refusal(server.push_chunks(update_id, corrupt))
            assert sum(await server.received_bytes(update_id)) == 0
            await server.push_chunks(update_id, chunk_of(tensors, 0, 0, length))
            held = await server.received_bytes(update_id)
        assert (found.code, found.reason) == ("DATA_LOSS", "CHUNK_CORRUPT")
        assert held[0] == length

    @pytest.mark.parametrize("offset", [0, 1 << 20], ids=["sent twice", "ahead"])
    async def test_a_chunk_out_of_order_is_told_where_to_go_on(self, offset: int) -> None:
        async with self.connect() as server:
            tensors = server.tensors()
            update_id, _ = await server.begin()
            length = min(_PART, len(tensors[0].data) // 2)
            first = chunk_of(tensors, 0, 0, length)
            second = chunk_of(tensors, 0, 0, length)
            second.offset = offset
            found = await refusal(server.push_chunks(update_id, first, second))
            held = await server.received_bytes(update_id)
        assert (found.code, found.reason) == ("OUT_OF_RANGE", "CHUNK_OUT_OF_ORDER")
        detail = found.detail(errors_pb2.ChunkOutOfOrder)
        assert (detail.tensor_index, detail.expected_offset) == (0, length)
        assert held[0] == length, "bytes received before the refusal were lost"

    @pytest.mark.parametrize("wrong", ["index", "past the end", "empty", "too long"])
    async def test_a_chunk_that_has_no_place_is_refused(self, wrong: str) -> None:
        async with self.connect() as server:
            tensors = server.tensors()
            update_id, begun = await server.begin()
            size = len(tensors[0].data)
            lengths = {"past the end": size + 1, "too long": begun.max_chunk_bytes + 1, "empty": 0}
            found = await refusal(
                server.push_chunks(update_id, _blank(lengths.get(wrong, 4), wrong))
            )
        assert (found.code, found.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")

    async def test_a_stream_begins_with_its_header(self) -> None:
        async with self.connect() as server:
            chunk = chunk_of(server.tensors(), 0, 0, 4)
            messages = [sync.PushWeightsRequest(chunk=chunk)]
            found = await refusal(server.stubs.weights.PushWeights(messages, timeout=CALL_S))
        assert (found.code, found.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert found.detail(errors_pb2.InvalidField).field == "payload"

    async def test_a_push_that_broke_goes_on_where_it_was(self) -> None:
        async with self.connect() as server:
            wanted, _ = await server.update_and_sample(1), await server.update(0)
            tensors = server.tensors(1)
            size = len(tensors[0].data)
            update_id, begun = await server.begin(1)
            half = min(size // 2, begun.max_chunk_bytes)
            await server.push_chunks(update_id, chunk_of(tensors, 0, 0, half))
            _, again = await server.begin(1, update_id=update_id)
            assert again.received_bytes[0] == half
            step = begun.max_chunk_bytes
            rest = [
                chunk_of(tensors, 0, at, min(step, size - at)) for at in range(half, size, step)
            ]
            await server.push_chunks(update_id, *rest)
            await self._push_others(server, update_id, tensors, step)
            assert await server.commit(update_id) == server.info.weight_version + 1
            assert await server.sample() == wanted

    async def _push_others(
        self, server: ServerHarness, update_id: str, tensors: list[NamedTensor], step: int
    ) -> None:
        """Pushes all tensors except the first, over two concurrent streams."""
        streams: list[list[sync.WeightChunk]] = [[], []]
        for index, tensor in enumerate(tensors[1:], start=1):
            for at in range(0, len(tensor.data), step):
                length = min(step, len(tensor.data) - at)
                streams[index % 2].append(chunk_of(tensors, index, at, length))
        await asyncio.gather(*(server.push_chunks(update_id, *each) for each in streams))


@pytest.mark.asyncio
class CheckCommit(Checks):
    """CommitUpdate: all weights switch, or none."""

    async def test_a_commit_runs_on_when_its_caller_gives_up(self) -> None:
        async with self.connect() as server:
            update_id, _ = await server.begin()
            await server.push(update_id)
            wanted = server.generate_request()
            wanted.sampling.max_tokens = server.info.model.context_length
            running = server.stubs.generation.Generate(wanted, timeout=CALL_S)
            await running.read()
            request = sync.CommitUpdateRequest(
                update_id=update_id, in_flight=sync.IN_FLIGHT_POLICY_DRAIN
            )
            try:
                await server.stubs.weights.CommitUpdate(request, timeout=0.05)
                pytest.skip("the server samples a whole context within 50 ms")
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            version = await server.commit(update_id)
            assert version == server.info.weight_version + 1
            assert (await server.refresh()).weight_version == version
            assert (await remaining_messages(running))[-1].finished.num_tokens > 0

    async def test_what_lacks_bytes_is_not_committed(self) -> None:
        async with self.connect() as server:
            tensors = server.tensors()
            before = token_ids_of(await server.generate())
            update_id, _ = await server.begin()
            whole = len(tensors[0].data)
            if whole <= 1 << 20:
                await server.push_chunks(update_id, chunk_of(tensors, 0, 0, whole))
            found = await refusal(server.commit(update_id))
            after = token_ids_of(await server.generate())
        assert (found.code, found.reason) == ("FAILED_PRECONDITION", "UPDATE_INCOMPLETE")
        lacking = list(found.detail(errors_pb2.UpdateIncomplete).tensor_indices)
        assert lacking and lacking == sorted(set(lacking))
        assert (0 in lacking) == (whole > 1 << 20)
        assert after == before

    @pytest.mark.parametrize("policy", [0, 9], ids=["unspecified", "unknown"])
    async def test_a_commit_names_a_policy(self, policy: int) -> None:
        async with self.connect() as server:
            update_id, _ = await server.begin()
            await server.push(update_id)
            found = await refusal(server.commit(update_id, policy))  # type: ignore[arg-type]
        assert found.reason == "INVALID_FIELD"
        assert found.detail(errors_pb2.InvalidField).field == "in_flight"

    async def test_the_old_version_serves_until_the_commit(self) -> None:
        async with self.connect() as server:
            base = server.info.weight_version
            before = token_ids_of(await server.generate())
            update_id, _ = await server.begin()
            pushed = await server.push(update_id)
            assert pushed.received_bytes == sum(len(tensor.data) for tensor in server.tensors())
            assert token_ids_of(await server.generate()) == before
            assert await server.commit(update_id) == base + 1
            assert await server.commit(update_id) == base + 1, "a repeated commit"
            messages = await server.generate(min_weight_version=base + 1)
            assert (await server.refresh()).weight_version == base + 1
        assert {message.tokens.weight_version for message in messages[1:-1]} == {base + 1}

    async def test_a_paused_server_stays_paused_over_an_update(self) -> None:
        async with self.connect() as server:
            update_id, _ = await server.begin()
            await server.push(update_id)
            await server.pause()
            await server.commit(update_id)
            assert (await server.refresh()).state == srv.SERVER_STATE_PAUSED
            found = await server.refused_generate()
        assert found.reason == "PAUSED"

    async def test_nothing_commits_into_weights_that_are_released(self) -> None:
        async with self.connect() as server:
            if not server.capabilities.release_memory:
                pytest.skip("the server cannot release memory")
            update_id, _ = await server.begin()
            await server.push(update_id)
            await server.pause()
            request = srv.ReleaseMemoryRequest(kinds=[srv.MEMORY_KIND_WEIGHTS])
            await server.stubs.control.ReleaseMemory(request, timeout=CALL_S)
            found = await refusal(server.commit(update_id))
        assert (found.code, found.reason) == ("FAILED_PRECONDITION", "STATE_CONFLICT")


def _blank(length: int, wrong: str) -> sync.WeightChunk:
    """Returns a chunk of zeros for the first tensor, or for an index that does not exist."""
    data = bytes(length)
    index = 1 << 20 if wrong == "index" else 0
    return sync.WeightChunk(tensor_index=index, data=data, crc32=zlib.crc32(data))
