# ruff: noqa: D102  (a check's name says what it shows)
"""Updates that overwrite the engine's weights as they come: who waits, and who is turned away."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from treadle.conformance.checks.server_harness import CALL_S, Bench, Checks, chunk_of, ids, rest_of
from treadle.conformance.client.refusals import refusal
from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync

_DRAIN: dict[str, Any] = {"in_place": sync.InPlace(in_flight=sync.IN_FLIGHT_POLICY_DRAIN)}
_KINDS = [srv.MEMORY_KIND_WEIGHTS]
_CALLS: dict[str, Callable[[Bench], Awaitable[object]]] = {
    "Pause": lambda it: it.pause(),
    "Resume": lambda it: it.resume(),
    "ReleaseMemory": lambda it: it.stubs.control.ReleaseMemory(
        srv.ReleaseMemoryRequest(kinds=_KINDS), timeout=CALL_S
    ),
    "RestoreMemory": lambda it: it.stubs.control.RestoreMemory(
        srv.RestoreMemoryRequest(kinds=_KINDS), timeout=CALL_S
    ),
}


@pytest.mark.asyncio
class CheckInPlace(Checks):
    """BeginUpdate(in_place)."""

    @asynccontextmanager
    async def able(self) -> AsyncIterator[Bench]:
        async with self.bench() as it:
            if not it.can.in_place_update:
                pytest.skip("it takes no updates in place")
            yield it

    async def test_nothing_is_sampled_after_one_without_commit(self) -> None:
        async with self.able() as it:
            update_id, _ = await it.begin(**_DRAIN)
            assert (await it.info()).state == srv.SERVER_STATE_UPDATING
            await it.abort(update_id)
            assert (await it.info()).state == srv.SERVER_STATE_LOADING
            health = health_pb2_grpc.HealthStub(it.channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
            found = await it.refused()
            version = it.server.weight_version
            assert await it.bring(0) == version + 1
            assert it.server.state == srv.SERVER_STATE_SERVING
            assert len(ids(await it.generate())) == 8
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (found.code, found.reason) == ("UNAVAILABLE", "PAUSED")
        assert found.detail(error_details_pb2.RetryInfo).HasField("retry_delay")

    @pytest.mark.parametrize("call", list(_CALLS))
    async def test_pauses_do_not_cross_one(self, call: str) -> None:
        async with self.able() as it:
            if "Memory" in call and not it.can.release_memory:
                pytest.skip("it releases no memory")
            update_id, _ = await it.begin(**_DRAIN)
            found = await refusal(_CALLS[call](it))
            await it.push(update_id)
            assert await it.commit(update_id) == it.server.weight_version + 1
            assert (await it.info()).state == srv.SERVER_STATE_SERVING
        assert (found.code, found.reason) == ("FAILED_PRECONDITION", "STATE_CONFLICT")

    async def test_calls_that_come_meanwhile_run_on_the_new_version(self) -> None:
        async with self.able() as it:
            version = it.server.weight_version + 1
            update_id, _ = await it.begin(**_DRAIN)
            waiting = await self._waiting(it, min_weight_version=version)
            await it.push(update_id)
            assert not waiting.done()
            assert await it.commit(update_id) == version
            messages = await waiting
        assert {m.tokens.weight_version for m in messages if m.HasField("tokens")} == {version}

    async def test_calls_that_wait_are_turned_away_when_it_ends_without_commit(self) -> None:
        async with self.able() as it:
            update_id, _ = await it.begin(**_DRAIN)
            waiting = await self._waiting(it)
            await it.abort(update_id)
            found = await refusal(waiting)
        assert (found.code, found.reason) == ("UNAVAILABLE", "PAUSED")

    async def _waiting(
        self, it: Bench, **fields: Any
    ) -> "asyncio.Task[list[gen.GenerateResponse]]":
        """A call that the server has let wait, as far as its load tells."""
        queued = (await it.info()).load.queued
        task = asyncio.create_task(it.generate(**fields))
        for _ in range(1000):
            if (await it.info()).load.queued > queued or task.done():
                break
        return task

    async def test_what_went_into_the_engine_counts_as_received(self) -> None:
        async with self.able() as it:
            wanted, _ = await it.after(1), await it.bring(0)
            tensors = it.tensors(1)
            size = len(tensors[0].data)
            update_id, begun = await it.begin(1, **_DRAIN)
            step = begun.max_chunk_bytes
            first = [chunk_of(tensors, 0, at, min(step, size - at)) for at in range(0, size, step)]
            await it.push_chunks(update_id, *first)
            assert (await it.held(update_id))[0] == size
            rest = [
                chunk_of(tensors, index, at, min(step, len(tensor.data) - at))
                for index, tensor in enumerate(tensors)
                for at in range(0, len(tensor.data), step)
                if index
            ]
            await it.push_chunks(update_id, *rest)
            assert await it.commit(update_id) == it.server.weight_version + 1
            assert await it.sampled() == wanted

    async def test_what_continue_kept_ends_when_it_ends_without_commit(self) -> None:
        async with self.able() as it:
            if not it.can.in_flight_continue:
                pytest.skip("it cannot continue")
            wanted = it.want()
            wanted.sampling.max_tokens = it.server.model.context_length
            call = it.stubs.generation.Generate(wanted, timeout=CALL_S)
            await call.read()
            policy = sync.InPlace(in_flight=sync.IN_FLIGHT_POLICY_CONTINUE)
            update_id, _ = await it.begin(in_place=policy)
            if not (await it.info()).load.running:
                pytest.skip("it sampled a whole context before it paused")
            await it.abort(update_id)
            last = (await rest_of(call))[-1]
        assert last.finished.reason == gen.FINISH_REASON_INTERRUPTED

    async def test_weights_that_are_released_are_not_written(self) -> None:
        async with self.able() as it:
            if not it.can.release_memory:
                pytest.skip("it releases no memory")
            await it.pause()
            await _CALLS["ReleaseMemory"](it)
            _, found = await it.refused_begin(**_DRAIN)
        assert (found.code, found.reason) == ("FAILED_PRECONDITION", "STATE_CONFLICT")
