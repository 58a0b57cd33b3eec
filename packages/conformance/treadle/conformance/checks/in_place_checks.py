# ruff: noqa: D102  (a check's name says what it shows)
"""Updates in place, which overwrite the weights as they arrive: what waits, what is refused."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from treadle.conformance.client.refusals import refusal
from treadle.conformance.server_harness import (
    CALL_S,
    Checks,
    ServerHarness,
    chunk_of,
    remaining_messages,
    token_ids_of,
)
from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync

_DRAIN: dict[str, Any] = {"in_place": sync.InPlace(in_flight=sync.IN_FLIGHT_POLICY_DRAIN)}
_KINDS = [srv.MEMORY_KIND_WEIGHTS]
_CALLS: dict[str, Callable[[ServerHarness], Awaitable[object]]] = {
    "Pause": lambda server: server.pause(),
    "Resume": lambda server: server.resume(),
    "ReleaseMemory": lambda server: server.stubs.control.ReleaseMemory(
        srv.ReleaseMemoryRequest(kinds=_KINDS), timeout=CALL_S
    ),
    "RestoreMemory": lambda server: server.stubs.control.RestoreMemory(
        srv.RestoreMemoryRequest(kinds=_KINDS), timeout=CALL_S
    ),
}


@pytest.mark.asyncio
class CheckInPlace(Checks):
    """BeginUpdate(in_place)."""

    @asynccontextmanager
    async def capable(self) -> AsyncIterator[ServerHarness]:
        async with self.connect() as server:
            if not server.capabilities.in_place_update:
                pytest.skip("the server takes no updates in place")
            yield server

    async def test_it_is_refused_without_the_capability(self) -> None:
        async with self.connect() as server:
            if server.capabilities.in_place_update:
                pytest.skip("the server takes updates in place")
            _, found = await server.refused_begin(**_DRAIN)
        assert (found.code, found.reason) == ("UNIMPLEMENTED", "CAPABILITY_MISSING")

    async def test_nothing_is_sampled_after_one_without_commit(self) -> None:
        async with self.capable() as server:
            update_id, _ = await server.begin(**_DRAIN)
            assert (await server.refresh()).state == srv.SERVER_STATE_UPDATING
            await server.abort(update_id)
            assert (await server.refresh()).state == srv.SERVER_STATE_LOADING
            health = health_pb2_grpc.HealthStub(server.channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
            found = await server.refused_generate()
            version = server.info.weight_version
            assert await server.update(0) == version + 1
            assert server.info.state == srv.SERVER_STATE_SERVING
            assert len(token_ids_of(await server.generate())) == 8
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (found.code, found.reason) == ("UNAVAILABLE", "PAUSED")
        assert found.detail(error_details_pb2.RetryInfo).HasField("retry_delay")

    @pytest.mark.parametrize("call", list(_CALLS))
    async def test_pauses_do_not_cross_one(self, call: str) -> None:
        async with self.capable() as server:
            if "Memory" in call and not server.capabilities.release_memory:
                pytest.skip("the server cannot release memory")
            update_id, _ = await server.begin(**_DRAIN)
            found = await refusal(_CALLS[call](server))
            await server.push(update_id)
            assert await server.commit(update_id) == server.info.weight_version + 1
            assert (await server.refresh()).state == srv.SERVER_STATE_SERVING
        assert (found.code, found.reason) == ("FAILED_PRECONDITION", "STATE_CONFLICT")

    async def test_calls_that_come_meanwhile_run_on_the_new_version(self) -> None:
        async with self.capable() as server:
            version = server.info.weight_version + 1
            update_id, _ = await server.begin(**_DRAIN)
            waiting = await self._waiting(server, min_weight_version=version)
            await server.push(update_id)
            assert not waiting.done()
            assert await server.commit(update_id) == version
            messages = await waiting
        assert {m.tokens.weight_version for m in messages if m.HasField("tokens")} == {version}

    async def test_calls_that_wait_are_turned_away_when_it_ends_without_commit(self) -> None:
        async with self.capable() as server:
            update_id, _ = await server.begin(**_DRAIN)
            waiting = await self._waiting(server)
            await server.abort(update_id)
            found = await refusal(waiting)
        assert (found.code, found.reason) == ("UNAVAILABLE", "PAUSED")

    async def _waiting(
        self, server: ServerHarness, **fields: Any
    ) -> "asyncio.Task[list[gen.GenerateResponse]]":
        """Returns a call that the server has queued, as far as its load shows."""
        queued = (await server.refresh()).load.queued
        task = asyncio.create_task(server.generate(**fields))
        for _ in range(1000):
            if (await server.refresh()).load.queued > queued or task.done():
                break
        return task

    async def test_what_went_into_the_engine_counts_as_received(self) -> None:
        async with self.capable() as server:
            wanted, _ = await server.update_and_sample(1), await server.update(0)
            tensors = server.tensors(1)
            size = len(tensors[0].data)
            update_id, begun = await server.begin(1, **_DRAIN)
            step = begun.max_chunk_bytes
            first = [chunk_of(tensors, 0, at, min(step, size - at)) for at in range(0, size, step)]
            await server.push_chunks(update_id, *first)
            assert (await server.received_bytes(update_id))[0] == size
            rest = [
                chunk_of(tensors, index, at, min(step, len(tensor.data) - at))
                for index, tensor in enumerate(tensors)
                for at in range(0, len(tensor.data), step)
                if index
            ]
            await server.push_chunks(update_id, *rest)
            assert await server.commit(update_id) == server.info.weight_version + 1
            assert await server.sample() == wanted

    async def test_what_continue_kept_ends_when_it_ends_without_commit(self) -> None:
        async with self.capable() as server:
            if not server.capabilities.in_flight_continue:
                pytest.skip("the server does not support CONTINUE")
            wanted = server.generate_request()
            wanted.sampling.max_tokens = server.info.model.context_length
            call = server.stubs.generation.Generate(wanted, timeout=CALL_S)
            await call.read()
            policy = sync.InPlace(in_flight=sync.IN_FLIGHT_POLICY_CONTINUE)
            update_id, _ = await server.begin(in_place=policy)
            if not (await server.refresh()).load.running:
                pytest.skip("the server sampled a whole context before it paused")
            await server.abort(update_id)
            last = (await remaining_messages(call))[-1]
        assert last.finished.reason == gen.FINISH_REASON_INTERRUPTED

    async def test_weights_that_are_released_are_not_written(self) -> None:
        async with self.capable() as server:
            if not server.capabilities.release_memory:
                pytest.skip("the server cannot release memory")
            await server.pause()
            await _CALLS["ReleaseMemory"](server)
            _, found = await server.refused_begin(**_DRAIN)
        assert (found.code, found.reason) == ("FAILED_PRECONDITION", "STATE_CONFLICT")
