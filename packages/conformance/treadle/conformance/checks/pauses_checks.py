# ruff: noqa: D102  (a check's name says what it shows)
"""Pause, Resume, ReleaseMemory, RestoreMemory: which call fits which state."""

import pytest
from google.rpc import error_details_pb2

from treadle.conformance.checks.server_harness import CALL_S, Bench, Checks, ids
from treadle.conformance.client.refusals import refusal
from treadle.rollout.v1 import errors_pb2
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync

_KV_CACHE = [srv.MEMORY_KIND_KV_CACHE]


def _need_memory(it: Bench) -> None:
    if not it.can.release_memory:
        pytest.skip("it releases no memory")


@pytest.mark.asyncio
class CheckPauses(Checks):
    """The lifecycle of a server."""

    async def test_a_paused_server_turns_calls_away_with_a_delay(self) -> None:
        async with self.bench() as it:
            before = ids(await it.generate())
            await it.pause()
            await it.pause()
            assert (await it.info()).state == srv.SERVER_STATE_PAUSED
            found = await it.refused()
            await it.resume()
            await it.resume()
            assert (await it.info()).state == srv.SERVER_STATE_SERVING
            after = ids(await it.generate())
        assert (found.code, found.reason) == ("UNAVAILABLE", "PAUSED")
        assert found.detail(error_details_pb2.RetryInfo).HasField("retry_delay")
        assert after == before

    @pytest.mark.parametrize("policy", [0, 9], ids=["unspecified", "unknown"])
    async def test_a_pause_names_a_policy(self, policy: int) -> None:
        async with self.bench() as it:
            request = srv.PauseRequest(in_flight=policy)  # type: ignore[arg-type]
            found = await refusal(it.stubs.control.Pause(request, timeout=CALL_S))
            assert (await it.info()).state == srv.SERVER_STATE_SERVING
        assert found.reason == "INVALID_FIELD"
        assert found.detail(errors_pb2.InvalidField).field == "in_flight"

    async def test_continue_is_refused_without_the_capability(self) -> None:
        async with self.bench() as it:
            if it.can.in_flight_continue:
                pytest.skip("it can continue")
            found = await refusal(it.pause(sync.IN_FLIGHT_POLICY_CONTINUE))
        assert (found.code, found.reason) == ("UNIMPLEMENTED", "CAPABILITY_MISSING")

    async def test_memory_is_refused_without_the_capability(self) -> None:
        async with self.bench() as it:
            if it.can.release_memory:
                pytest.skip("it releases memory")
            await it.pause()
            request = srv.ReleaseMemoryRequest(kinds=_KV_CACHE)
            found = await refusal(it.stubs.control.ReleaseMemory(request, timeout=CALL_S))
        assert (found.code, found.reason) == ("UNIMPLEMENTED", "CAPABILITY_MISSING")

    async def test_memory_is_released_only_while_paused(self) -> None:
        async with self.bench() as it:
            _need_memory(it)
            request = srv.ReleaseMemoryRequest(kinds=_KV_CACHE)
            found = await refusal(it.stubs.control.ReleaseMemory(request, timeout=CALL_S))
        assert (found.code, found.reason) == ("FAILED_PRECONDITION", "STATE_CONFLICT")

    async def test_a_server_without_its_memory_does_not_resume(self) -> None:
        async with self.bench() as it:
            _need_memory(it)
            before = ids(await it.generate())
            await it.pause()
            release = srv.ReleaseMemoryRequest(kinds=_KV_CACHE)
            await it.stubs.control.ReleaseMemory(release, timeout=CALL_S)
            found = await refusal(it.resume())
            restore = srv.RestoreMemoryRequest(kinds=_KV_CACHE)
            await it.stubs.control.RestoreMemory(restore, timeout=CALL_S)
            await it.resume()
            after = ids(await it.generate())
        assert (found.code, found.reason) == ("FAILED_PRECONDITION", "STATE_CONFLICT")
        assert after == before

    @pytest.mark.parametrize("kinds", [[], [0], [9]], ids=["none", "unspecified", "unknown"])
    async def test_memory_calls_name_a_kind(self, kinds: list[int]) -> None:
        async with self.bench() as it:
            _need_memory(it)
            await it.pause()
            control = it.stubs.control
            release = srv.ReleaseMemoryRequest(kinds=kinds)  # type: ignore[arg-type]
            restore = srv.RestoreMemoryRequest(kinds=kinds)  # type: ignore[arg-type]
            for found in (
                await refusal(control.ReleaseMemory(release, timeout=CALL_S)),
                await refusal(control.RestoreMemory(restore, timeout=CALL_S)),
            ):
                assert found.reason == "INVALID_FIELD"
                assert found.detail(errors_pb2.InvalidField).field == "kinds"

    async def test_memory_under_kept_sequences_is_not_released(self) -> None:
        async with self.bench() as it:
            _need_memory(it)
            if not it.can.in_flight_continue:
                pytest.skip("it cannot keep sequences")
            most = it.server.model.context_length
            wanted = it.want()
            wanted.sampling.max_tokens = most
            call = it.stubs.generation.Generate(wanted, timeout=CALL_S)
            await call.read()
            await it.pause(sync.IN_FLIGHT_POLICY_CONTINUE)
            if not (await it.info()).load.running:
                pytest.skip("it sampled a whole context before it paused")
            request = srv.ReleaseMemoryRequest(kinds=_KV_CACHE)
            found = await refusal(it.stubs.control.ReleaseMemory(request, timeout=CALL_S))
            call.cancel()
        assert (found.code, found.reason) == ("FAILED_PRECONDITION", "STATE_CONFLICT")
