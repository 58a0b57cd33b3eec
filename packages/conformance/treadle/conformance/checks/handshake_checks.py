# ruff: noqa: D102  (a check's name says what it shows)
"""The handshake of every client: GetServerInfo, health, reflection, deadlines and tokens."""

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from treadle.conformance.client.refusals import refusal
from treadle.conformance.client.stubs import stubs_for
from treadle.conformance.server_harness import CALL_S, Checks, ServerHarness
from treadle.rollout.v1 import errors_pb2
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync

SERVICES = tuple(
    f"treadle.rollout.v1.{name}"
    for name in ("GenerationService", "WeightSyncService", "ServerService")
)
_CALLS: tuple[tuple[str, str, Message], ...] = (
    ("control", "GetServerInfo", srv.GetServerInfoRequest()),
    ("control", "Pause", srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_DRAIN)),
    ("control", "Resume", srv.ResumeRequest()),
    ("control", "ReleaseMemory", srv.ReleaseMemoryRequest(kinds=[srv.MEMORY_KIND_KV_CACHE])),
    ("control", "RestoreMemory", srv.RestoreMemoryRequest(kinds=[srv.MEMORY_KIND_KV_CACHE])),
    ("weights", "BeginUpdate", sync.BeginUpdateRequest(update_id="u")),
    ("weights", "GetUpdate", sync.GetUpdateRequest(update_id="u")),
    ("weights", "CommitUpdate", sync.CommitUpdateRequest(update_id="u")),
    ("weights", "AbortUpdate", sync.AbortUpdateRequest(update_id="u")),
)
_Seen = Callable[[str, object], None]


@pytest.mark.asyncio
class CheckHandshake(Checks):
    """GetServerInfo, the standard services, and deadlines."""

    async def test_the_handshake_says_what_is_served(self, record_property: _Seen) -> None:
        async with self.connect() as server:
            info = server.info
        model, limits = info.model, info.limits
        assert info.engine, "engine is empty"
        assert info.state == srv.SERVER_STATE_SERVING
        assert model.vocab_size > 1 and model.context_length > 1
        assert len(model.tokenizer_sha256) in (0, 32), "tokenizer_sha256 is not a SHA-256"
        assert all(i < model.vocab_size for i in model.eos_token_ids)
        assert limits.max_in_flight > 0
        assert info.capabilities.inline_transport, "every server takes inline updates"
        assert info.capabilities.sampled_logprobs, "every server reports log-probs"
        can = [name.name for name, value in info.capabilities.ListFields() if value]
        record_property("seen", ", ".join(can))

    async def test_the_load_adds_up(self) -> None:
        async with self.connect() as server:
            before = (await server.refresh()).load
            if not server.info.HasField("load"):
                pytest.skip("the server reports no load")
            await server.generate()
            after = (await server.refresh()).load
        for load in (before, after):
            assert load.started == load.finished + load.aborted + load.running
        assert (after.started - before.started, after.finished - before.finished) == (1, 1)

    async def test_health_says_serving_for_each_service(self) -> None:
        async with self.connect() as server:
            stub = health_pb2_grpc.HealthStub(server.channel)
            for service in ("", *SERVICES):
                request = health_pb2.HealthCheckRequest(service=service)
                answer = await stub.Check(request, timeout=CALL_S)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING, service

    async def test_a_paused_server_is_healthy(self) -> None:
        async with self.connect() as server:
            await server.pause()
            stub = health_pb2_grpc.HealthStub(server.channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
            assert (await server.refresh()).state == srv.SERVER_STATE_PAUSED
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

    async def test_reflection_lists_the_services(self) -> None:
        async with self.connect() as server:
            stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            call = stub.ServerReflectionInfo(
                iter([request]), timeout=CALL_S, metadata=self.settings.target.metadata
            )
            answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert names >= set(SERVICES)

    @pytest.mark.parametrize(
        ("service", "method", "request_"), _CALLS, ids=[name for _, name, _ in _CALLS]
    )
    async def test_a_call_without_a_deadline_is_refused(
        self, service: str, method: str, request_: Message
    ) -> None:
        async with self.connect() as server:
            found = await refusal(getattr(getattr(server.stubs, service), method)(request_))
        assert (found.code, found.reason) == ("INVALID_ARGUMENT", "DEADLINE_REQUIRED")

    async def test_a_stream_without_a_deadline_is_refused(self) -> None:
        async with self.connect() as server:
            generation = await refusal(
                server.stubs.generation.Generate(server.generate_request()).read()
            )
            push = await refusal(server.stubs.weights.PushWeights([sync.PushWeightsRequest()]))
        for found in (generation, push):
            assert (found.code, found.reason) == ("INVALID_ARGUMENT", "DEADLINE_REQUIRED")

    async def test_bytes_that_are_no_message_are_refused(self) -> None:
        name = sync.DESCRIPTOR.services_by_name["WeightSyncService"].full_name
        async with self.connect() as server:
            call: Any = server.channel.unary_unary(f"/{name}/GetUpdate")  # takes bytes
            metadata = self.settings.target.metadata
            found = await refusal(call(b"\xff", timeout=CALL_S, metadata=metadata))
        assert (found.code, found.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert found.detail(errors_pb2.InvalidField).field == "request"


@pytest.mark.asyncio
class CheckToken(Checks):
    """Authentication; skipped unless the kit has the server's token."""

    async def _bare(self, server: ServerHarness, *metadata: tuple[str, str]) -> None:
        if not self.settings.target.metadata:
            pytest.skip("the kit has no token: set --token-file")
        stubs = stubs_for(server.channel, metadata)
        info = await refusal(
            stubs.control.GetServerInfo(srv.GetServerInfoRequest(), timeout=CALL_S)
        )
        generate = await refusal(
            stubs.generation.Generate(server.generate_request(), timeout=CALL_S).read()
        )
        for found in (info, generate):
            assert (found.code, found.reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED")

    async def test_a_call_without_the_token_is_refused(self) -> None:
        async with self.connect() as server:
            await self._bare(server)

    async def test_a_call_with_a_wrong_token_is_refused(self) -> None:
        async with self.connect() as server:
            await self._bare(server, ("authorization", "Bearer not-the-token"))

    async def test_health_needs_no_token(self) -> None:
        async with self.connect() as server:
            stub = health_pb2_grpc.HealthStub(server.channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
