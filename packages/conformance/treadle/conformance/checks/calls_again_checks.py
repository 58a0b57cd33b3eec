# ruff: noqa: D102  (a check's name says what it shows)
"""Repeated calls of an update, as after a lost answer: the answer depends on the update's state.

Covers the rows of the table in docs/protocol.md that are visible from outside and need an update
with all its bytes.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from treadle.conformance.client.refusals import refusal
from treadle.conformance.server_harness import (
    CALL_S,
    Checks,
    ServerHarness,
    chunk_of,
    remaining_messages,
)
from treadle.rollout.v1 import errors_pb2
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync

_IN_PLACE = {"in_place": sync.InPlace(in_flight=sync.IN_FLIGHT_POLICY_DRAIN)}
_WAYS = pytest.mark.parametrize("way", [{}, _IN_PLACE], ids=["staged", "in place"])
_Way = dict[str, Any]
_UNKNOWN = ("NOT_FOUND", "UPDATE_UNKNOWN")
_CONFLICT = ("FAILED_PRECONDITION", "STATE_CONFLICT")


class PushedUpdate:
    """An update whose bytes have all been pushed, and its calls."""

    def __init__(self, server: ServerHarness, update_id: str, way: _Way) -> None:
        self.server = server
        self.update_id = update_id
        self.version = server.info.weight_version + 1
        self._way = way

    @property
    def all_bytes(self) -> list[int]:
        return [len(tensor.data) for tensor in self.server.tensors()]

    async def begin(self) -> list[int]:
        fields: _Way = {"update_id": self.update_id, "weight_version": self.version} | self._way
        _, begun = await self.server.begin(**fields)
        return list(begun.received_bytes)

    async def refused_begin(self, **changes: Any) -> tuple[str, str]:
        fields: _Way = {"update_id": self.update_id, "weight_version": self.version} | self._way
        _, found = await self.server.refused_begin(**fields | changes)
        return found.code, found.reason

    async def refused(self, call: str) -> tuple[str, str]:
        tensors = self.server.tensors()
        calls = {
            "GetUpdate": self.server.received_bytes,
            "PushWeights": lambda name: self.server.push_chunks(name, chunk_of(tensors, 0, 0, 4)),
            "CommitUpdate": self.server.commit,
            "AbortUpdate": self.server.abort,
        }
        found = await refusal(calls[call](self.update_id), call)
        if found.reason == "CHUNK_OUT_OF_ORDER":
            detail = found.detail(errors_pb2.ChunkOutOfOrder)
            assert detail.expected_offset == self.all_bytes[0]
        return found.code, found.reason

    async def is_over(self) -> None:
        """Checks the answers of all calls except BeginUpdate after a commit."""
        for call in ("GetUpdate", "PushWeights"):
            assert await self.refused(call) == _UNKNOWN, f"{call} after CommitUpdate"
        assert await self.server.commit(self.update_id) == self.version
        assert await self.refused("AbortUpdate") == _CONFLICT, "AbortUpdate after CommitUpdate"


@pytest.mark.asyncio
class CheckCallsAgain(Checks):
    """See the module docstring."""

    @asynccontextmanager
    async def pushed(self, way: _Way) -> AsyncIterator[PushedUpdate]:
        async with self.connect() as server:
            if way and not server.capabilities.in_place_update:
                pytest.skip("the server takes no updates in place")
            update_id, _ = await server.begin(**way)
            await server.push(update_id)
            yield PushedUpdate(server, update_id, way)

    @_WAYS
    async def test_a_whole_update_is_held_until_it_is_dropped(self, way: _Way) -> None:
        async with self.pushed(way) as update:
            assert await update.begin() == update.all_bytes
            assert await update.server.received_bytes(update.update_id) == update.all_bytes
            assert await update.refused("PushWeights") == ("OUT_OF_RANGE", "CHUNK_OUT_OF_ORDER")
            await update.server.abort(update.update_id)
            for call in ("GetUpdate", "PushWeights", "CommitUpdate"):
                assert await update.refused(call) == _UNKNOWN, f"{call} after AbortUpdate"
            await update.server.abort(update.update_id)

    @_WAYS
    async def test_an_update_that_was_dropped_may_begin_anew(self, way: _Way) -> None:
        async with self.pushed(way) as update:
            await update.server.abort(update.update_id)
            assert not any(await update.begin()), "it still holds bytes of the aborted update"
            await update.server.push(update.update_id)
            assert await update.server.commit(update.update_id) == update.version

    @_WAYS
    async def test_an_update_that_serves_is_known(self, way: _Way) -> None:
        async with self.pushed(way) as update:
            server = update.server
            assert await server.commit(update.update_id) == update.version
            before = await server.sample()
            await update.is_over()
            assert await update.begin() == update.all_bytes
            await update.is_over()
            info = await server.refresh()
            assert (info.state, info.weight_version) == (
                srv.SERVER_STATE_SERVING,
                update.version,
            )
            assert await server.sample() == before

    @_WAYS
    async def test_an_update_that_serves_is_not_announced_otherwise(self, way: _Way) -> None:
        async with self.pushed(way) as update:
            tensors = list(update.server.begin_request().tensors)[::-1]
            if len(tensors) < 2:
                pytest.skip("the model has only one tensor")
            await update.server.commit(update.update_id)
            found = await update.refused_begin(tensors=tensors)
        assert found == ("INVALID_ARGUMENT", "INVALID_FIELD")

    @_WAYS
    async def test_an_update_that_served_before_is_remembered(self, way: _Way) -> None:
        async with self.pushed(way) as update:
            await update.server.commit(update.update_id)
            await update.server.refresh()
            await update.server.update(0)
            await update.is_over()
            found = await update.refused_begin()
        assert found == ("FAILED_PRECONDITION", "WEIGHT_VERSION_BEHIND")

    async def test_an_update_that_is_being_committed_is_neither_dropped_nor_begun(self) -> None:
        """The answers are the same if the commit has ended meanwhile."""
        async with self.pushed({}) as update:
            server = update.server
            wanted = server.generate_request()
            wanted.sampling.max_tokens = server.info.model.context_length
            running = server.stubs.generation.Generate(wanted, timeout=CALL_S)
            await running.read()
            committing = asyncio.create_task(server.commit(update.update_id))
            while not committing.done():
                if (await server.refresh()).state == srv.SERVER_STATE_UPDATING:
                    break
            assert await update.begin() == update.all_bytes
            assert await update.refused("AbortUpdate") == _CONFLICT
            assert await server.commit(update.update_id) == await committing == update.version
            assert (await remaining_messages(running))[-1].finished.num_tokens > 0
