"""The router's owner: names the replicas that the routing service places sessions on.

Invariant: a call that returns has been carried out. It may be repeated after one that failed: only
what differs is changed.
"""

from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import grpc.aio

from treadle.agent_loop.errors import ReplicaUnavailableError
from treadle.agent_loop.rpc.errors import classify
from treadle.agent_loop.rpc.replica_client import Metadata
from treadle.agent_loop.rpc.security import ChannelSecurity
from treadle.rollout.v1 import routing_service_pb2 as pb
from treadle.rollout.v1 import routing_service_pb2_grpc as pb_grpc

__all__ = ["RouterAdmin"]


class _AdminStub(Protocol):
    """The types of the generated stub, which has none."""

    def ListReplicas(
        self, request: pb.ListReplicasRequest, *, timeout: float, metadata: Metadata
    ) -> Awaitable[pb.ListReplicasResponse]: ...

    def RegisterReplica(
        self, request: pb.RegisterReplicaRequest, *, timeout: float, metadata: Metadata
    ) -> Awaitable[pb.RegisterReplicaResponse]: ...

    def DrainReplica(
        self, request: pb.DrainReplicaRequest, *, timeout: float, metadata: Metadata
    ) -> Awaitable[pb.DrainReplicaResponse]: ...

    def RemoveReplica(
        self, request: pb.RemoveReplicaRequest, *, timeout: float, metadata: Metadata
    ) -> Awaitable[pb.RemoveReplicaResponse]: ...


class RouterAdmin:
    """A connection to a router, for its owner. Close it with `aclose`.

    Args:
        timeout_s: Maximum duration of one call, in seconds.

    Raises:
        SetupError: A token would travel in plain text.
    """

    def __init__(self, address: str, security: ChannelSecurity, *, timeout_s: float = 5.0) -> None:
        self._address = address
        self._channel = security.open(address)
        self._stub: _AdminStub = cast(Any, pb_grpc).RoutingServiceStub(self._channel)
        self._metadata = security.metadata
        self._timeout_s = timeout_s

    async def aclose(self) -> None:
        """Closes the connection."""
        await self._channel.close()

    async def set_replicas(
        self, serving: Sequence[str], draining: Sequence[str] = ()
    ) -> Mapping[str, int]:
        """Makes these all replicas of the router.

        Args:
            serving: Addresses of those that take new sessions.
            draining: Addresses of those that keep the sessions they have.

        Returns:
            How many sessions each replica that it had before has open.

        Raises:
            ReplicaUnavailableError: The router does not answer, or refuses.
        """
        with self._named():
            return await self._set_replicas(serving, draining)

    async def occupied_s(self) -> Mapping[str, float]:
        """Returns for how long each replica has had open sessions since the router began.

        Raises:
            ReplicaUnavailableError: The router does not answer, or refuses.
        """
        with self._named():
            answer = await self._list()
        return {
            replica.address: replica.occupied_time.ToNanoseconds() / 1e9
            for replica in answer.replicas
        }

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as failed:
            failure = classify(self._address, failed)
            raise ReplicaUnavailableError(f"router {failure.error}") from failed

    async def _list(self) -> pb.ListReplicasResponse:
        return await self._stub.ListReplicas(
            pb.ListReplicasRequest(), timeout=self._timeout_s, metadata=self._metadata
        )

    async def _set_replicas(
        self, serving: Sequence[str], draining: Sequence[str]
    ) -> Mapping[str, int]:
        timeout, metadata = self._timeout_s, self._metadata
        answer = await self._list()
        has = {replica.address: replica.draining for replica in answer.replicas}
        for address in has.keys() - {*serving, *draining}:
            await self._stub.RemoveReplica(
                pb.RemoveReplicaRequest(address=address), timeout=timeout, metadata=metadata
            )
        for address in (*serving, *draining):
            drains = address in draining
            if address not in has or (has[address] and not drains):
                await self._stub.RegisterReplica(
                    pb.RegisterReplicaRequest(address=address), timeout=timeout, metadata=metadata
                )
            if drains and not has.get(address, False):
                await self._stub.DrainReplica(
                    pb.DrainReplicaRequest(address=address), timeout=timeout, metadata=metadata
                )
        return {replica.address: replica.open_sessions for replica in answer.replicas}
