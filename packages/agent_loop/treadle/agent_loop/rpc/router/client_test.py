"""The worker's side of the routing service: what it asks, when, and what it does without answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from treadle.agent_loop import ReplicaUnavailableError, RequestRejectedError, StickySession
from treadle.agent_loop.rpc import ChannelSecurity, RetryPolicy, RpcDeadlines
from treadle.agent_loop.rpc.router.client import RemoteRouter
from treadle.agent_loop.rpc.router.server import RouterConfig, serve_router
from treadle.agent_loop.testing import FakeClock
from treadle.rollout.v1 import routing_service_pb2 as pb
from treadle.rollout.v1 import routing_service_pb2_grpc as pb_grpc

pytestmark = pytest.mark.asyncio

A, B = "10.0.0.1:4000", "10.0.0.2:4000"
RETRY = RetryPolicy(max_failures=2, initial_s=1.0, max_s=8.0, jitter=0.0)


class Router(pb_grpc.RoutingServiceServicer):
    """Notes what it is asked; fails as often as it is told."""

    def __init__(self, *, valid_for_s: int = 0) -> None:
        self.valid_for_s = valid_for_s
        self.failures: list[grpc.StatusCode] = []
        self.opened: list[pb.OpenSessionRequest] = []
        self.finished: list[str] = []
        self.finish_tried = asyncio.Semaphore(0)

    async def _maybe_fail(self, context: Any) -> None:
        if self.failures:
            await context.abort(self.failures.pop(0), "told to")

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Any) -> Any:
        self.opened.append(request)
        await self._maybe_fail(context)
        response = pb.OpenSessionResponse(address=A)
        response.valid_for.FromSeconds(self.valid_for_s)
        return response

    async def FinishSession(self, request: pb.FinishSessionRequest, context: Any) -> Any:
        self.finish_tried.release()
        await self._maybe_fail(context)
        self.finished.append(request.session_id)
        return pb.FinishSessionResponse()


@asynccontextmanager
async def remote(address: str, clock: FakeClock) -> AsyncIterator[RemoteRouter]:
    async with RemoteRouter.connect(
        address,
        security=ChannelSecurity(),
        deadlines=RpcDeadlines(),
        retry=RETRY,
        clock=clock,
    ) as router:
        yield router


@asynccontextmanager
async def asking(service: Router, clock: FakeClock) -> AsyncIterator[RemoteRouter]:
    server = grpc.aio.server()
    pb_grpc.add_RoutingServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with remote(f"127.0.0.1:{port}", clock) as router:
            yield router
    finally:
        await server.stop(None)


async def ask(router: RemoteRouter, session: str = "s", *avoid: str, wait_s: float = 60) -> Any:
    return await router.open(session, context_tokens=7, avoid=avoid, wait_s=wait_s)


async def test_an_answer_is_used_while_it_is_valid_and_then_goes_with_the_question() -> None:
    service, clock = Router(valid_for_s=10), FakeClock()
    async with asking(service, clock) as router:
        for _ in range(3):
            assert await ask(router) == A
        await clock.advance(10)
        assert await ask(router) == A
        await ask(router, "s", A)
    assert [
        (r.current_address, r.context_tokens, list(r.avoid_addresses)) for r in service.opened
    ] == [("", 7, []), (A, 7, []), (A, 7, [A])]


async def test_an_open_session_goes_on_at_once_while_the_router_is_away() -> None:
    service, clock = Router(), FakeClock()
    async with asking(service, clock) as router:
        await ask(router)
        service.failures = [grpc.StatusCode.UNAVAILABLE]
        for _ in range(5):
            assert await ask(router) == A
        assert len(service.opened) == 2  # and the router is left alone for a while
        await clock.advance(1.0)
        assert await ask(router) == A
        assert len(service.opened) == 3
    assert clock.slept == []


async def test_a_new_session_waits_longer_and_longer_until_its_deadline() -> None:
    service, clock = Router(), FakeClock()
    async with asking(service, clock) as router:
        service.failures = [grpc.StatusCode.UNAVAILABLE] * 4
        waiting = asyncio.create_task(ask(router, wait_s=6.0))
        for seconds in (1.0, 2.0):
            await clock.until_sleeping(1)
            await clock.advance(seconds)
        with pytest.raises(ReplicaUnavailableError, match=r"router 127.*UNAVAILABLE: told to"):
            await waiting
    assert clock.slept == [1.0, 2.0]


async def test_a_last_call_that_has_too_little_time_does_not_hide_what_was_wrong() -> None:
    service, clock = Router(), FakeClock()
    async with asking(service, clock) as router:
        service.failures = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED]
        waiting = asyncio.create_task(ask(router, wait_s=2.5))
        await clock.until_sleeping(1)
        await clock.advance(1.0)
        with pytest.raises(ReplicaUnavailableError, match=r"router 127.*UNAVAILABLE: told to"):
            await waiting


async def test_what_cannot_change_is_raised_at_once() -> None:
    service, clock = Router(), FakeClock()
    async with asking(service, clock) as router:
        service.failures = [grpc.StatusCode.UNAUTHENTICATED]
        with pytest.raises(RequestRejectedError, match="UNAUTHENTICATED"):
            await ask(router)


async def test_no_replica_is_waited_for_unless_the_caller_avoids_some() -> None:
    clock = FakeClock()
    async with serve_router(RouterConfig()) as address, remote(address, clock) as router:
        assert await ask(router, "s", B) is None
        waiting = asyncio.create_task(ask(router))
        await clock.until_sleeping(1)
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = pb_grpc.RoutingServiceStub(channel)
            await stub.RegisterReplica(pb.RegisterReplicaRequest(address=A), timeout=60)
        await clock.advance(1.0)
        assert await waiting == A


async def test_a_session_is_finished_in_the_background() -> None:
    service, clock = Router(), FakeClock()
    async with asking(service, clock) as router:
        await ask(router)
        service.failures = [grpc.StatusCode.UNAVAILABLE]
        for _ in range(2):
            router.finish("s")
        router.finish("never opened")
        await service.finish_tried.acquire()
        await clock.until_sleeping(1)
        await clock.advance(1.0)
        await service.finish_tried.acquire()
    assert set(service.finished) == {"s"}  # told again if the end came in between


async def test_what_is_finished_last_is_told_before_the_channel_closes() -> None:
    service, clock = Router(), FakeClock()
    async with asking(service, clock) as router:
        for name in ("a", "b"):
            await ask(router, name)
            router.finish(name)
    assert sorted(set(service.finished)) == ["a", "b"]


async def test_no_room_until_the_deadline_is_a_timeout() -> None:
    """The router holds the call and asks to come back; a session keeps its turn meanwhile."""
    policy = StickySession(cache_tokens=10)
    config = RouterConfig(policy=policy, replicas=(A,), hold_s=0.01)
    async with serve_router(config) as address:
        clock = FakeClock()
        async with remote(address, clock) as router:
            assert await ask(router, "s0") == A
            waiting = asyncio.create_task(ask(router, "s1", wait_s=5.0))
            while not waiting.done():
                await clock.advance(1.0)
                await ask(router, "s0")
            with pytest.raises(TimeoutError):
                await waiting


class ManyRouter(Router):
    """Opens and finishes many sessions at once, but for those named "full"."""

    def __init__(self, *, valid_for_s: int = 0) -> None:
        super().__init__(valid_for_s=valid_for_s)
        self.gate = asyncio.Event()
        self.asked = asyncio.Event()
        self.together: list[list[str]] = []
        self.finished_together: list[list[str]] = []

    async def OpenSessions(self, request: pb.OpenSessionsRequest, context: Any) -> Any:
        self.together.append([session.session_id for session in request.sessions])
        self.asked.set()
        await self.gate.wait()
        await self._maybe_fail(context)
        answers = [
            pb.OpenSessionResponse(address="" if session.session_id == "full" else A)
            for session in request.sessions
        ]
        for answer in answers:
            answer.valid_for.FromSeconds(self.valid_for_s)
        return pb.OpenSessionsResponse(answers=answers)

    async def FinishSessions(self, request: pb.FinishSessionsRequest, context: Any) -> Any:
        self.finished_together.append(list(request.session_ids))
        self.finish_tried.release()
        return pb.FinishSessionsResponse()


async def test_sessions_that_ask_during_a_call_share_the_next() -> None:
    service, clock = ManyRouter(), FakeClock()
    async with asking(service, clock) as router:
        asked = [asyncio.create_task(ask(router, "s0"))]
        await service.asked.wait()
        asked += [asyncio.create_task(ask(router, name)) for name in ("s1", "left", "full")]
        await asyncio.sleep(0)
        asked[2].cancel()
        service.gate.set()
        answers = await asyncio.gather(*asked, return_exceptions=True)
    assert service.together == [["s0"], ["s1", "full"]]
    assert [request.session_id for request in service.opened] == ["full"]
    assert answers[:2] + answers[3:] == [A, A, A]


async def test_a_call_that_fails_fails_for_each_of_its_sessions() -> None:
    service, clock = ManyRouter(), FakeClock()
    service.gate.set()
    service.failures = [grpc.StatusCode.UNAVAILABLE]
    async with asking(service, clock) as router:
        asked = [asyncio.create_task(ask(router, name)) for name in ("s0", "s1")]
        await clock.until_sleeping(1)
        await clock.advance(1.0)
        assert await asyncio.gather(*asked) == [A, A]
    assert service.together == [["s0", "s1"]] * 2


async def test_finished_sessions_wait_a_little_for_one_another() -> None:
    service, clock = ManyRouter(valid_for_s=20), FakeClock()
    service.gate.set()
    async with asking(service, clock) as router:
        for name in ("s0", "s1"):
            await ask(router, name)
        router.finish("s0")
        await clock.until_sleeping(1)
        router.finish("s1")
        await clock.advance(1.0)  # a twentieth of 20 s
        await service.finish_tried.acquire()
    assert service.finished_together[0] == ["s0", "s1"]


async def test_a_router_that_predates_common_calls_is_asked_for_each_session() -> None:
    service, clock = Router(), FakeClock()
    async with asking(service, clock) as router:
        assert await asyncio.gather(*(ask(router, name) for name in ("s0", "s1"))) == [A, A]
        router.finish("s0")
        router.finish("s1")
        for _ in range(2):
            await service.finish_tried.acquire()
    assert [request.session_id for request in service.opened] == ["s0", "s1"]
    assert set(service.finished) == {"s0", "s1"}
