# ruff: noqa: D102  (a check's name says what it shows)
"""Pause, Resume, ReleaseMemory and RestoreMemory: which call is valid in which state."""

import pytest
from google.rpc import error_details_pb2

from treadle.conformance.client.refusals import refusal
from treadle.conformance.server_harness import CALL_S, Checks, ServerHarness, token_ids_of
from treadle.rollout.v1 import errors_pb2
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync

_KV_CACHE = [srv.MEMORY_KIND_KV_CACHE]


def _need_memory(server: ServerHarness) -> None:
    if not server.capabilities.release_memory:
        pytest.skip("the server cannot release memory")


@pytest.mark.asyncio
class CheckPauses(Checks):
    """The lifecycle of a server."""

    async def test_a_paused_server_turns_calls_away_with_a_delay(self) -> None:
        async with self.connect() as server:
            before = token_ids_of(await server.generate())
            await server.pause()
            await server.pause()
            assert (await server.refresh()).state == srv.SERVER_STATE_PAUSED
            found = await server.refused_generate()
            await server.resume()
            await server.resume()
            assert (await server.refresh()).state == srv.SERVER_STATE_SERVING
            after = token_ids_of(await server.generate())
        assert (found.code, found.reason) == ("UNAVAILABLE", "PAUSED")
        assert found.detail(error_details_pb2.RetryInfo).HasField("retry_delay")
        assert after == before

    @pytest.mark.parametrize("policy", [0, 9], ids=["unspecified", "unknown"])
    async def test_a_pause_names_a_policy(self, policy: int) -> None:
        async with self.connect() as server:
            request = srv.PauseRequest(in_flight=policy)  # type: ignore[arg-type]
            found = await refusal(server.stubs.control.Pause(request, timeout=CALL_S))
            assert (await server.refresh()).state == srv.SERVER_STATE_SERVING
        assert found.reason == "INVALID_FIELD"
        assert found.detail(errors_pb2.InvalidField).field == "in_flight"

    async def test_continue_is_refused_without_the_capability(self) -> None:
        async with self.connect() as server:
            if server.capabilities.in_flight_continue:
                pytest.skip("the server supports CONTINUE")
            found = await refusal(server.pause(sync.IN_FLIGHT_POLICY_CONTINUE))
        assert (found.code, found.reason) == ("UNIMPLEMENTED", "CAPABILITY_MISSING")

    async def test_memory_is_refused_without_the_capability(self) -> None:
        async with self.connect() as server:
            if server.capabilities.release_memory:
                pytest.skip("the server can release memory")
            await server.pause()
            request = srv.ReleaseMemoryRequest(kinds=_KV_CACHE)
            found = await refusal(server.stubs.control.ReleaseMemory(request, timeout=CALL_S))
        assert (found.code, found.reason) == ("UNIMPLEMENTED", "CAPABILITY_MISSING")

    async def test_memory_is_released_only_while_paused(self) -> None:
        async with self.connect() as server:
            _need_memory(server)
            request = srv.ReleaseMemoryRequest(kinds=_KV_CACHE)
            found = await refusal(server.stubs.control.ReleaseMemory(request, timeout=CALL_S))
        assert (found.code, found.reason) == ("FAILED_PRECONDITION", "STATE_CONFLICT")

    async def test_a_server_without_its_memory_does_not_resume(self) -> None:
        async with self.connect() as server:
            _need_memory(server)
            before = token_ids_of(await server.generate())
            await server.pause()
            release = srv.ReleaseMemoryRequest(kinds=_KV_CACHE)
            await server.stubs.control.ReleaseMemory(release, timeout=CALL_S)
            found = await refusal(server.resume())
            restore = srv.RestoreMemoryRequest(kinds=_KV_CACHE)
            await server.stubs.control.RestoreMemory(restore, timeout=CALL_S)
            await server.resume()
            after = token_ids_of(await server.generate())
        assert (found.code, found.reason) == ("FAILED_PRECONDITION", "STATE_CONFLICT")
        assert after == before

    @pytest.mark.parametrize("kinds", [[], [0], [9]], ids=["none", "unspecified", "unknown"])
    async def test_memory_calls_name_a_kind(self, kinds: list[int]) -> None:
        async with self.connect() as server:
            _need_memory(server)
            await server.pause()
            control = server.stubs.control
            release = srv.ReleaseMemoryRequest(kinds=kinds)  # type: ignore[arg-type]
            restore = srv.RestoreMemoryRequest(kinds=kinds)  # type: ignore[arg-type]
            for found in (
                await refusal(control.ReleaseMemory(release, timeout=CALL_S)),
                await refusal(control.RestoreMemory(restore, timeout=CALL_S)),
            ):
                assert found.reason == "INVALID_FIELD"
                assert found.detail(errors_pb2.InvalidField).field == "kinds"

    async def test_memory_under_kept_sequences_is_not_released(self) -> None:
        async with self.connect() as server:
            _need_memory(server)
            if not server.capabilities.in_flight_continue:
                pytest.skip("the server does not support CONTINUE")
            most = server.info.model.context_length
            wanted = server.generate_request()
            wanted.sampling.max_tokens = most
            call = server.stubs.generation.Generate(wanted, timeout=CALL_S)
            await call.read()
            await server.pause(sync.IN_FLIGHT_POLICY_CONTINUE)
            if not (await server.refresh()).load.running:
                pytest.skip("the server sampled a whole context before it paused")
            request = srv.ReleaseMemoryRequest(kinds=_KV_CACHE)
            found = await refusal(server.stubs.control.ReleaseMemory(request, timeout=CALL_S))
            call.cancel()
        assert (found.code, found.reason) == ("FAILED_PRECONDITION", "STATE_CONFLICT")
