"""The client's connections to its replicas, which may be added and removed during a run.

Invariants:

1. A replica is used only after its handshake, and only if it is compatible with the client and
   with the replicas that are already connected. An incompatible one that is added later is never
   used; the log gives the reason.
2. Callers that need the same new replica share one handshake.
3. A retired replica gets no new call. Its channel closes when its last call has ended.

A caller that needs a new replica waits in `reach` for its handshake, bounded by the call's
deadline.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc.aio

from treadle.agent_loop.aio import concurrently
from treadle.agent_loop.clock import Clock
from treadle.agent_loop.errors import ReplicaUnavailableError, SetupError
from treadle.agent_loop.rpc.handshake import Requirements, ServerInfo, check
from treadle.agent_loop.rpc.replica_client import ReplicaClient, RpcDeadlines
from treadle.agent_loop.rpc.retry import Backoff, RetryPolicy
from treadle.agent_loop.rpc.security import ChannelSecurity

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Connection:
    """A replica, its channel and the number of calls that use it."""

    replica: ReplicaClient
    channel: grpc.aio.Channel
    num_calls: int = 0
    retired: bool = False

    async def aclose(self) -> None:
        """Closes the channel, and what uses it."""
        await self.replica.aclose()
        await self.channel.close()


class ReplicaConnections:
    """The channels and handshakes of a client's replicas. Close them with `aclose`.

    Args:
        requirements: Capabilities that every replica must offer.
        client: "name/version", for the servers' logs.
    """

    def __init__(
        self,
        *,
        requirements: Requirements,
        security: ChannelSecurity,
        deadlines: RpcDeadlines,
        retry: RetryPolicy,
        clock: Clock,
        client: str,
    ) -> None:
        self._requirements = requirements
        self._security = security
        self._deadlines = deadlines
        self._retry = retry
        self._clock = clock
        self._client = client
        self._connections: dict[str, _Connection] = {}
        self._retired: set[_Connection] = set()
        self._backoffs: dict[str, Backoff] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    @property
    def servers(self) -> tuple[ServerInfo, ...]:
        """Each replica's answer at its handshake."""
        return tuple(connection.replica.info for connection in self._connections.values())

    @property
    def backoffs(self) -> Mapping[str, Backoff]:
        """The back-off per address, including addresses that were never reached."""
        return self._backoffs

    async def add_all(self, addresses: Sequence[str]) -> None:
        """Connects to replicas, waiting for those that are still starting.

        Raises:
            SetupError: A replica does not answer in time or is incompatible; then none is added.
        """
        connections: dict[str, _Connection] = {}

        async def add(address: str) -> None:
            connections[address] = await self._connect(address, self._deadlines)

        try:
            await concurrently([add(address) for address in addresses])
            added = [connections[address].replica.info for address in addresses]
            check([*self.servers, *added], self._requirements)
        except BaseException:
            for connection in connections.values():
                await connection.channel.close()
            raise
        self._connections.update((address, connections[address]) for address in addresses)

    async def add_reachable(self, addresses: Iterable[str]) -> list[SetupError]:
        """Connects to those replicas that answer; returns why the others were not added."""

        async def add(address: str) -> SetupError | None:
            try:
                await self._shake_hands_once(address)
            except ReplicaUnavailableError as away:
                return SetupError(str(away))
            return None

        results = await concurrently([add(address) for address in addresses])
        return [result for result in results if result is not None]

    async def reach(self, address: str) -> ReplicaClient:
        """Returns a replica; a new one gets one handshake attempt, with no wait for its start.

        Raises:
            ReplicaUnavailableError: The replica does not answer, or is incompatible.
        """
        if (connection := self._connections.get(address)) is not None:
            return connection.replica
        try:
            return await self._shake_hands_once(address)
        except SetupError as error:
            self._backoffs[address].until = math.inf
            _log.warning("replica %s is not used: %s", address, error)
            raise ReplicaUnavailableError(f"{address} is not used: {error}") from error

    @asynccontextmanager
    async def calling(self, replica: ReplicaClient) -> AsyncIterator[None]:
        """Keeps the replica's channel open while the block runs."""
        connection = self._connections.get(replica.info.address)
        if connection is None or connection.replica is not replica:
            connection = next(each for each in self._retired if each.replica is replica)
        connection.num_calls += 1
        try:
            yield
        finally:
            connection.num_calls -= 1
            await self._close_if_done(connection)

    async def retire(self, address: str) -> None:
        """Removes a replica. Idempotent."""
        self._backoffs.pop(address, None)
        self._locks.pop(address, None)
        if (connection := self._connections.pop(address, None)) is not None:
            connection.retired = True
            self._retired.add(connection)
            await self._close_if_done(connection)

    async def aclose(self) -> None:
        """Closes every channel."""
        for connection in (*self._connections.values(), *self._retired):
            await connection.aclose()

    async def _close_if_done(self, connection: _Connection) -> None:
        if connection.retired and not connection.num_calls:
            self._retired.discard(connection)
            await connection.aclose()

    async def _shake_hands_once(self, address: str) -> ReplicaClient:
        async with self._locks.setdefault(address, asyncio.Lock()):
            if (known := self._connections.get(address)) is not None:
                return known.replica
            try:
                connection = await self._connect(address, replace(self._deadlines, connect_s=0.0))
            except SetupError as away:
                raise ReplicaUnavailableError(str(away)) from away
            try:
                check([*self.servers, connection.replica.info], self._requirements)
            except SetupError:
                await connection.channel.close()
                raise
            self._connections[address] = connection
            return connection.replica

    async def _connect(self, address: str, deadlines: RpcDeadlines) -> _Connection:
        channel = self._security.open(address)
        try:
            replica = await ReplicaClient.shake_hands(
                address,
                channel,
                backoff=self._backoffs.setdefault(address, Backoff()),
                metadata=self._security.metadata,
                deadlines=deadlines,
                retry=self._retry,
                clock=self._clock,
                client=self._client,
            )
        except BaseException:
            await channel.close()
            raise
        return _Connection(replica, channel)
