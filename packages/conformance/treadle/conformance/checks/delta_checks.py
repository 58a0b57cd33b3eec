# ruff: noqa: D102  (a check's name says what it shows)
"""Delta updates: the base, the changes, and what a server does when they do not match."""

import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from treadle.conformance.checks.files_checks import directory_in, write_delta
from treadle.conformance.client.changes import changed, delta_encoding, encode, encoded
from treadle.conformance.client.refusals import Refusal, refusal
from treadle.conformance.server_harness import SHARED, Checks, ServerHarness
from treadle.rollout.v1 import errors_pb2
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.engine import NamedTensor

_MISMATCH = ("FAILED_PRECONDITION", "DELTA_BASE_MISMATCH")
_DRAIN = sync.InPlace(in_flight=sync.IN_FLIGHT_POLICY_DRAIN)
_Fields = dict[str, Any]
_INVALID: tuple[tuple[str, str, Callable[[sync.DeltaEncoding], _Fields]], ...] = (
    ("base 0", "delta.base_weight_version", lambda delta: _changed(delta, base_weight_version=0)),
    ("sizes of too few", "delta.encoded_bytes", lambda delta: _changed(delta, encoded_bytes=[0])),
    ("checksums of too few", "delta.crc32", lambda delta: _changed(delta, crc32=[0])),
    (
        "no such size",
        "delta.encoded_bytes[0]",
        lambda delta: _changed(delta, encoded_bytes=[1, *delta.encoded_bytes[1:]]),
    ),
    ("in place", "in_place", lambda delta: {"delta": delta, "in_place": _DRAIN}),
    ("base kept in place", "in_place", lambda delta: {"keep_base": True, "in_place": _DRAIN}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerWithBase:
    """A server with weight set 0 as its delta base, and the weights a delta leads to."""

    server: ServerHarness
    version: int
    old: list[NamedTensor]
    new: list[NamedTensor]

    async def begin(
        self, old: list[NamedTensor], new: list[NamedTensor], *, base: int, **fields: Any
    ) -> tuple[str, list[bytes]]:
        """Begins an update and returns its id and the changes to send."""
        changes = encoded(old, new)
        values = {"delta": delta_encoding(base, changes, new)} | fields
        update_id, begun = await self.server.begin(0, **values)
        assert list(begun.received_bytes) == [0] * len(new)
        return update_id, changes

    async def push(self, **fields: Any) -> str:
        """Begins an update, sends the changes to the new weights, and returns its id."""
        update_id, changes = await self.begin(self.old, self.new, base=self.version, **fields)
        await self.send(update_id, changes)
        return update_id

    async def send(self, update_id: str, changes: Sequence[bytes]) -> None:
        """Sends the changes, one chunk per tensor."""
        chunks = [chunk(index, data) for index, data in enumerate(changes) if data]
        await self.server.push_chunks(update_id, *chunks)

    async def refused(self, **fields: Any) -> Refusal:
        """Begins a delta update that must be refused."""
        changes = encoded(self.old, self.new)
        delta = delta_encoding(self.version, changes, self.new)
        _, found = await self.server.refused_begin(**({"delta": delta} | fields))
        return found


@pytest.mark.asyncio
class CheckDelta(Checks):
    """See the module docstring."""

    @asynccontextmanager
    async def based(self) -> AsyncIterator[ServerWithBase]:
        async with self.connect() as server:
            if not server.capabilities.delta_encoding:
                pytest.skip("the server takes no deltas")
            old = server.tensors(0)
            version = await server.update(0, keep_base=True)
            yield ServerWithBase(
                server=server, version=version, old=old, new=changed(old, server.tensors(1))
            )

    @pytest.mark.parametrize("transport", ["inline", "shared_memory"])
    async def test_a_delta_brings_what_the_whole_brings_and_others_follow(
        self, transport: str
    ) -> None:
        async with self.based() as based:
            server, old, new = based.server, based.old, based.new
            if transport == "shared_memory":
                await server.require_shared_memory()
            first = await server.sample()
            wanted = await server.update_and_sample(new)
            assert wanted != first, "both sets of weights give the same completion"
            base = await server.update(0, keep_base=True)
            fields = SHARED if transport == "shared_memory" else {}
            for before, after, told in ((old, new, wanted), (new, old, first), (old, old, first)):
                update_id, changes = await based.begin(before, after, base=base, **fields)
                if transport == "inline":
                    await based.send(update_id, changes)
                else:
                    await server.push_shared_memory(update_id, changes)
                base += 1
                assert await server.commit(update_id) == base
                assert await server.sample() == told
                await server.refresh()

    async def test_files_bring_a_delta_of_the_base_that_they_name(self) -> None:
        async with self.based() as based:
            server, old, new = based.server, based.old, based.new
            if not server.capabilities.file_transport:
                pytest.skip("the server reads no files")
            if self.settings.files is None:
                pytest.skip("needs the directory that the server reads: set --files")
            changes = encoded(old, new)
            delta = delta_encoding(based.version, changes, new)
            crc32 = [zlib.crc32(data) for data in changes]
            with directory_in(self.settings.files) as directory:
                path = directory / "delta.safetensors"
                file = sync.FileTransport(directory=directory.name, crc32=crc32)
                fields: _Fields = {"delta": delta, "inline": None, "file": file}
                write_delta(path, new, changes, base=based.version + 1)
                found = await based.refused(**fields)
                write_delta(path, new, changes, base=based.version)
                update_id, begun = await server.begin(0, **fields)
                assert list(begun.received_bytes) == [len(data) for data in changes]
                assert await server.commit(update_id) == based.version + 1
            after = await server.sample()
            await server.refresh()
            assert after == await server.update_and_sample(new)
        assert (found.code, found.reason) == ("DATA_LOSS", "FILE_UNREADABLE")

    async def test_a_delta_is_pushed_and_resumed_like_any_update(self) -> None:
        async with self.based() as based:
            server = based.server
            update_id, changes = await based.begin(based.old, based.new, base=based.version)
            index = next(index for index, data in enumerate(changes) if data)
            half = len(changes[index]) // 2
            await server.push_chunks(update_id, chunk(index, changes[index][:half]))
            lacking = await refusal(server.commit(update_id))
            assert (await server.received_bytes(update_id))[index] == half
            rest = chunk(index, changes[index][half:], offset=half)
            others = [chunk(i, data) for i, data in enumerate(changes) if data and i != index]
            await server.push_chunks(update_id, rest, *others)
            assert await server.received_bytes(update_id) == [len(data) for data in changes]
            assert await server.commit(update_id) == based.version + 1
            after = await server.sample()
            await server.refresh()
            assert after == await server.update_and_sample(based.new)
        assert (lacking.code, lacking.reason) == ("FAILED_PRECONDITION", "UPDATE_INCOMPLETE")

    async def test_another_base_is_refused_with_the_one_that_is_held(self) -> None:
        async with self.based() as based:
            delta = delta_encoding(based.version + 7, encoded(based.old, based.new), based.new)
            before = await based.server.sample()
            found = await based.refused(delta=delta)
            assert await based.server.sample() == before
            update_id = await based.push()
            assert await based.server.commit(update_id) == based.version + 1
        assert (found.code, found.reason) == _MISMATCH
        detail = found.detail(errors_pb2.DeltaBaseMismatch)
        assert (detail.held, detail.wanted) == (based.version, based.version + 7)

    async def test_tensors_in_another_order_than_the_bases_are_refused(self) -> None:
        async with self.based() as based:
            tensors = list(based.server.begin_request().tensors)[::-1]
            if len(tensors) < 2:
                pytest.skip("the model has only one tensor")
            changes = encoded(based.old, based.new)[::-1]
            delta = delta_encoding(based.version, changes, based.new[::-1])
            found = await based.refused(tensors=tensors, delta=delta)
        assert (found.code, found.reason) == _MISMATCH

    @pytest.mark.parametrize("ends", ["commits", "is given up"])
    async def test_a_full_update_without_keep_base_drops_it(self, ends: str) -> None:
        async with self.based() as based:
            if ends == "commits":
                await based.server.update(1)
            else:  # So that two copies are never held.
                update_id, _ = await based.server.begin(1)
                await based.server.abort(update_id)
            found = await based.refused()
        assert (found.code, found.reason) == _MISMATCH
        detail = found.detail(errors_pb2.DeltaBaseMismatch)
        assert (detail.held, detail.wanted) == (0, based.version)

    async def test_a_delta_without_commit_leaves_the_base(self) -> None:
        async with self.based() as based:
            server = based.server
            before = await server.sample()
            await server.abort(await based.push())
            assert await server.sample() == before
            assert await server.commit(await based.push()) == based.version + 1
            after = await server.sample()
            await server.refresh()
            assert after == await server.update_and_sample(based.new)

    async def test_a_delta_that_leads_elsewhere_is_refused_and_takes_the_base_with_it(
        self,
    ) -> None:
        async with self.based() as based:
            server = based.server
            before = await server.sample()
            delta = delta_encoding(based.version, encoded(based.old, based.new), based.new)
            delta.crc32[0] ^= 1
            found = await refusal(server.commit(await based.push(delta=delta)))
            assert await server.sample() == before
            again = await based.refused()
            await server.update(1)
        assert (found.code, found.reason) == _MISMATCH
        assert found.detail(errors_pb2.DeltaBaseMismatch).held == 0
        assert again.detail(errors_pb2.DeltaBaseMismatch).held == 0

    @pytest.mark.parametrize("wrong", ["outside", "descending"])
    async def test_changes_without_a_place_are_refused(self, wrong: str) -> None:
        async with self.based() as based:
            server, old = based.server, based.old
            size = old[0].spec.element_type.size_bytes
            count = len(old[0].data) // size
            places = [0, count] if wrong == "outside" else [1, 0]
            changes = [encode(places, [bytes(size)] * 2), *[b""] * (len(old) - 1)]
            before = await server.sample()
            delta = delta_encoding(based.version, changes, old)
            found = await refusal(self._sent(based, delta, changes))
            assert await server.sample() == before
        assert found.reason in ("DELTA_BASE_MISMATCH", "INVALID_FIELD")

    async def _sent(
        self, based: ServerWithBase, delta: sync.DeltaEncoding, changes: Sequence[bytes]
    ) -> None:
        update_id, _ = await based.server.begin(0, delta=delta)
        await based.send(update_id, changes)
        await based.server.commit(update_id)

    @pytest.mark.parametrize(
        ("field", "fields"), [row[1:] for row in _INVALID], ids=[row[0] for row in _INVALID]
    )
    async def test_a_malformed_delta_is_named(
        self, field: str, fields: Callable[[sync.DeltaEncoding], _Fields]
    ) -> None:
        async with self.based() as based:
            if "in place" in field and not based.server.capabilities.in_place_update:
                pytest.skip("the server takes no updates in place")
            delta = delta_encoding(based.version, encoded(based.old, based.new), based.new)
            _, found = await based.server.refused_begin(**fields(delta))
        assert (found.code, found.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert found.detail(errors_pb2.InvalidField).field == field

    @pytest.mark.parametrize("asked", ["delta", "keep_base"])
    async def test_it_is_refused_without_the_capability(self, asked: str) -> None:
        async with self.connect() as server:
            if server.capabilities.delta_encoding:
                pytest.skip("the server takes deltas")
            old = server.tensors(0)
            delta = delta_encoding(server.info.weight_version + 1, [b""] * len(old), old)
            fields: _Fields = {"delta": delta} if asked == "delta" else {"keep_base": True}
            _, found = await server.refused_begin(**fields)
        assert (found.code, found.reason) == ("UNIMPLEMENTED", "CAPABILITY_MISSING")


def chunk(index: int, data: bytes, *, offset: int = 0) -> sync.WeightChunk:
    """Returns a chunk with encoded bytes of a tensor."""
    return sync.WeightChunk(tensor_index=index, offset=offset, data=data, crc32=zlib.crc32(data))


def _changed(delta: sync.DeltaEncoding, **fields: Any) -> _Fields:
    other = sync.DeltaEncoding()
    other.CopyFrom(delta)
    for name, value in fields.items():
        other.ClearField(name)
        if isinstance(value, list):
            getattr(other, name).extend(value)
        else:
            setattr(other, name, value)
    return {"delta": other}
