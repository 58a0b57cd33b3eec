"""Tests of the router's owner, over gRPC."""

import pytest

from treadle.agent_loop import ReplicaUnavailableError
from treadle.agent_loop.clock import LoopClock
from treadle.agent_loop.rpc import ChannelSecurity, RetryPolicy, RpcDeadlines
from treadle.agent_loop.rpc.router.admin import RouterAdmin
from treadle.agent_loop.rpc.router.client import RemoteRouter
from treadle.agent_loop.rpc.router.server import RouterConfig, serve_router
from treadle.agent_loop.testing import FakeClock
from treadle.rollout.v1 import routing_service_pb2 as pb

pytestmark = pytest.mark.asyncio


async def _replicas(admin: RouterAdmin) -> dict[str, bool]:
    """Returns whether each replica drains, by address."""
    answer = await admin._stub.ListReplicas(pb.ListReplicasRequest(), timeout=5.0, metadata=())
    return {replica.address: replica.draining for replica in answer.replicas}


async def test_the_replicas_become_those_that_are_named() -> None:
    async with serve_router(RouterConfig(replicas=("a:1", "b:2"))) as address:
        admin = RouterAdmin(address, ChannelSecurity())
        await admin.set_replicas(["b:2"], ["c:3"])
        assert await _replicas(admin) == {"b:2": False, "c:3": True}
        await admin.set_replicas(["c:3"], ["b:2"])
        assert await _replicas(admin) == {"b:2": True, "c:3": False}
        await admin.set_replicas(["c:3"])
        assert await _replicas(admin) == {"c:3": False}
    with pytest.raises(ReplicaUnavailableError, match=f"router {address}"):
        await admin.set_replicas(["c:3"])
    await admin.aclose()


async def test_a_replica_is_occupied_while_any_worker_has_a_session_there() -> None:
    clock = FakeClock()
    async with (
        serve_router(RouterConfig(replicas=("a:1", "b:2")), clock=clock) as address,
        RemoteRouter.connect(
            address,
            security=ChannelSecurity(),
            deadlines=RpcDeadlines(),
            retry=RetryPolicy(),
            clock=LoopClock(),
        ) as worker,
    ):
        admin = RouterAdmin(address, ChannelSecurity())
        await worker.open("s", context_tokens=1, avoid=["b:2"], wait_s=60)
        await clock.advance(3.5)
        assert await admin.occupied_s() == {"a:1": 3.5, "b:2": 0.0}
    with pytest.raises(ReplicaUnavailableError, match=f"router {address}"):
        await admin.occupied_s()
    await admin.aclose()
