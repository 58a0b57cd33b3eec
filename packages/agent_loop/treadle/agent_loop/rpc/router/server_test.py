"""The routing service over real gRPC: answers, errors, token, health, the state file."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from treadle.agent_loop import HashedSession, SetupError, StickySession
from treadle.agent_loop.rpc.errors import classify
from treadle.agent_loop.rpc.router.server import RouterConfig, serve_router
from treadle.agent_loop.testing import FakeClock
from treadle.rollout.v1 import routing_service_pb2 as pb
from treadle.rollout.v1 import routing_service_pb2_grpc as pb_grpc

pytestmark = pytest.mark.asyncio

A, B = "10.0.0.1:4000", "10.0.0.2:4000"


class Stub:
    """The generated stub with a deadline on every call."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: Any = pb_grpc.RoutingServiceStub(channel)

    def __getattr__(self, method: str) -> Any:
        async def call(**fields: Any) -> Any:
            request = getattr(pb, f"{method}Request")(**fields)
            return await getattr(self._stub, method)(request, timeout=60)

        return call


@asynccontextmanager
async def routing(config: RouterConfig, clock: FakeClock | None = None) -> AsyncIterator[Stub]:
    async with (
        serve_router(config, clock=clock) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield Stub(channel)


async def failure_of(call: Any) -> str:
    """The failed call in one line: code, reason, message, and when to come back."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    failure = classify("router", caught.value)
    return f"{failure.error} [{failure.retry_after_s}]"


async def test_sessions_are_opened_kept_and_finished() -> None:
    async with routing(RouterConfig(replicas=(A, B), valid_for_s=2.5)) as stub:
        opened = [await stub.OpenSession(session_id=s) for s in ("s0", "s1", "s0")]
        assert [answer.address for answer in opened] == [A, B, A]
        assert not any(answer.moved for answer in opened)
        assert opened[0].valid_for.ToMilliseconds() == 2500
        await stub.FinishSession(session_id="s0")
        listed = (await stub.ListReplicas()).replicas
        assert [(r.address, r.draining, r.open_sessions) for r in listed] == [
            (A, False, 0),
            (B, False, 1),
        ]


async def test_sessions_are_opened_and_finished_together() -> None:
    policy = StickySession(cache_tokens=10)
    async with routing(RouterConfig(replicas=(A, B), policy=policy, valid_for_s=2.5)) as stub:
        asked = [
            pb.OpenSessionRequest(session_id=name, context_tokens=tokens)
            for name, tokens in (("s0", 9), ("s1", 9), ("full", 9), ("", 1))
        ]
        answers = (await stub.OpenSessions(sessions=asked)).answers
        assert [answer.address for answer in answers] == [A, B, "", ""]
        assert answers[0].valid_for.ToMilliseconds() == 2500
        assert policy.waiting == ()  # nobody waits for "full"
        await stub.FinishSessions(session_ids=["s0", "never opened"])
        answer = await stub.OpenSession(session_id="full", context_tokens=9)
        assert answer.address == A
        many = [pb.OpenSessionRequest(session_id=f"m{number}") for number in range(1025)]
        assert "sessions is '1025 values'; expected at most 1024" in await failure_of(
            stub.OpenSessions(sessions=many)
        )


async def test_replicas_come_drain_and_go() -> None:
    async with routing(RouterConfig()) as stub:
        assert "UNAVAILABLE NO_REPLICA: none of 0 replicas" in await failure_of(
            stub.OpenSession(session_id="s0")
        )
        for _ in range(2):
            await stub.RegisterReplica(address=A)
        assert (await stub.OpenSession(session_id="s0")).address == A
        assert (await stub.DrainReplica(address=A)).open_sessions == 1
        assert (await stub.OpenSession(session_id="s0")).address == A
        text = await failure_of(stub.OpenSession(session_id="s1"))
        assert "none of 1 replicas accepts session s1: 1 drain" in text
        assert text.endswith("[1.0]")
        await stub.RegisterReplica(address=B)
        for _ in range(2):
            await stub.RemoveReplica(address=A)
        moved = await stub.OpenSession(session_id="s0", current_address=A)
        assert (moved.address, moved.moved) == (B, True)


async def test_the_workers_current_address_is_used() -> None:
    async with routing(RouterConfig(replicas=(A, B))) as stub:
        kept = await stub.OpenSession(session_id="s0", current_address=B)
        assert (kept.address, kept.moved) == (B, False)
        left = await stub.OpenSession(session_id="s0", avoid_addresses=[B])
        assert (left.address, left.moved) == (A, True)
        assert "2 are to be avoided" in await failure_of(
            stub.OpenSession(session_id="s1", avoid_addresses=[A, B])
        )


async def test_a_call_without_room_is_held_and_then_told_to_come_back() -> None:
    config = RouterConfig(
        replicas=(A,), policy=StickySession(cache_tokens=10), hold_s=0.05, valid_for_s=0
    )
    async with routing(config) as stub:
        await stub.OpenSession(session_id="s0", context_tokens=8)
        text = await failure_of(stub.OpenSession(session_id="s1", context_tokens=8))
        assert "RESOURCE_EXHAUSTED OVERLOADED: no replica has room for session s1" in text
        assert text.endswith("[0.0]")
        await stub.FinishSession(session_id="s0")
        assert (await stub.OpenSession(session_id="s1", context_tokens=8)).address == A


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        ("OpenSession", {}, "INVALID_FIELD: session_id is ''; expected the trajectory's id"),
        ("FinishSession", {}, "INVALID_FIELD: session_id is ''"),
        ("FinishSession", {"session_id": "s"}, "NOT_FOUND SESSION_UNKNOWN: session s is not open"),
        ("RegisterReplica", {"address": "host"}, "address is 'host'; expected host:port"),
        ("DrainReplica", {"address": B}, f"address is '{B}'; expected one of {A}"),
    ],
)
async def test_wrong_calls_are_told_what_is_wrong(
    method: str, fields: dict[str, str], message: str
) -> None:
    async with routing(RouterConfig(replicas=(A,))) as stub:
        assert message in await failure_of(getattr(stub, method)(**fields))


async def test_a_session_of_a_dead_worker_is_freed_by_its_lease() -> None:
    clock = FakeClock()
    async with routing(RouterConfig(replicas=(A,), lease_s=60), clock) as stub:
        await stub.OpenSession(session_id="dead")
        await clock.advance(61)
        await stub.OpenSession(session_id="alive")
        (replica,) = (await stub.ListReplicas()).replicas
        assert replica.open_sessions == 1
        assert "its lease of 60 s expired" in await failure_of(
            stub.FinishSession(session_id="dead")
        )


async def test_deterministic_mode_needs_no_history() -> None:
    names = [f"s{i}" for i in range(20)]
    answers = []
    for replicas in ((A, B), (B, A)):
        config = RouterConfig(policy=HashedSession(), replicas=replicas)
        async with routing(config) as stub:
            answers.append([(await stub.OpenSession(session_id=name)).address for name in names])
    assert answers[0] == answers[1]
    assert set(answers[0]) == {A, B}


async def test_the_replicas_outlive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    async with routing(RouterConfig(replicas=(A,), state_file=path)) as stub:
        await stub.RegisterReplica(address=B)
        await stub.DrainReplica(address=A)
    assert json.loads(path.read_text()) == {"replicas": [A, B], "draining": [A]}
    async with routing(RouterConfig(state_file=path)) as stub:
        assert (await stub.OpenSession(session_id="old", current_address=A)).address == A
        assert (await stub.OpenSession(session_id="new")).address == B


@pytest.mark.parametrize("text", ["", "[]", '{"replicas": ["x"], "draining": []}'])
async def test_a_broken_state_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(SetupError, match=r"state file .*state\.json|is not host:port"):
        async with serve_router(RouterConfig(state_file=path)):
            pass


async def test_the_token_guards_all_but_health() -> None:
    async with (
        serve_router(RouterConfig(replicas=(A,), token="secret")) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = Stub(channel)
        assert "UNAUTHENTICATED: the call has no token" in await failure_of(stub.ListReplicas())
        raw: Any = pb_grpc.RoutingServiceStub(channel)
        for token, works in (("secret", True), ("wrong", False)):
            call = raw.ListReplicas(
                pb.ListReplicasRequest(),
                timeout=10,
                metadata=(("authorization", f"Bearer {token}"),),
            )
            if works:
                assert len((await call).replicas) == 1
            else:
                assert "a wrong token" in await failure_of(call)
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
        )
        with pytest.raises(grpc.aio.AioRpcError, match="no token"):
            [entry async for entry in reflected]


async def test_reflection_and_health_name_the_service() -> None:
    async with (
        serve_router(RouterConfig()) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
        )
        (answer,) = [entry async for entry in reflected]
        names = {service.name for service in answer.list_services_response.service}
        assert "treadle.rollout.v1.RoutingService" in names


async def test_a_call_needs_a_deadline() -> None:
    async with (
        serve_router(RouterConfig()) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        raw: Any = pb_grpc.RoutingServiceStub(channel)
        text = await failure_of(raw.ListReplicas(pb.ListReplicasRequest()))
        assert "DEADLINE_REQUIRED: /treadle.rollout.v1.RoutingService/ListReplicas needs" in text


async def test_an_address_in_use_is_named() -> None:
    async with serve_router(RouterConfig()) as address:
        with pytest.raises(SetupError, match=f"cannot listen on {address}"):
            async with serve_router(RouterConfig(address=address)):
                pass


METHOD = "/treadle.rollout.v1.RoutingService/ListReplicas"


async def test_a_caller_without_the_token_is_refused_before_the_message_is_read() -> None:
    async with (
        serve_router(RouterConfig(token="secret")) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        call: Any = channel.stream_unary(METHOD)(timeout=60)  # A stream: no message is sent.
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_message_that_does_not_parse_is_the_callers_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        serve_router(RouterConfig()) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        said = f"request is '20 bytes that do not parse'; expected the serialized.* {METHOD}"
        with pytest.raises(grpc.aio.AioRpcError, match=said) as refused:
            await cast("Any", channel.unary_unary(METHOD))(b"\xff" * 20, timeout=60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        health = "/grpc.health.v1.Health/"
        for method, message, code in (
            ("Check", b"\xff" * 20, grpc.StatusCode.INVALID_ARGUMENT),
            ("Check", b"\xff" * 2000, grpc.StatusCode.INVALID_ARGUMENT),
            ("List", b"", grpc.StatusCode.UNIMPLEMENTED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await cast("Any", channel.unary_unary(health + method))(message, timeout=60)
            assert refused.value.code() is code
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
    assert not caplog.records


async def test_ids_and_lists_of_a_session_are_bounded() -> None:
    async with routing(RouterConfig(replicas=(A,))) as stub:
        text = await failure_of(stub.OpenSession(session_id="s" * 129))
        assert "INVALID_FIELD: session_id is 'sss" in text and "of 1 to 128 bytes" in text
        many = [B] * 4097
        text = await failure_of(stub.OpenSession(session_id="s", avoid_addresses=many))
        assert "avoid_addresses is '4097 values'; expected at most 4096" in text
        with pytest.raises(grpc.aio.AioRpcError) as long:
            await stub.OpenSession(session_id="s", current_address="a" * (2 << 20))
        assert long.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.OpenSession(session_id="s")).address == A
