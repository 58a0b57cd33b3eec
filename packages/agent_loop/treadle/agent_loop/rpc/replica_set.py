"""The replica set: the servers that a client speaks to, which come and go while it runs.

Invariants:

1. A server is spoken to only after its handshake, and only if it fits the client and the servers
   that are there already. One that came later and does not fit is never used; the log says why.
2. Callers that need the same new server share one handshake.
3. A server that is retired gets no new call; its channel closes when its last call has ended.

Whoever needs a new server waits in `reach` for its handshake, bounded by the call's deadline.
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
from treadle.agent_loop.rpc.replica import Replica, Rest, RpcDeadlines
from treadle.agent_loop.rpc.retry import RetryPolicy
from treadle.agent_loop.rpc.security import ChannelSecurity

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Link:
    """A replica with its channel and the calls that use it."""

    replica: Replica
    channel: grpc.aio.Channel
    num_calls: int = 0
    retired: bool = False


class ReplicaSet:
    """See the module. Close it with `aclose`.

    Args:
        requirements: What every server must offer.
        security: TLS and token.
        deadlines: Upper bounds of calls.
        retry: Waits after failures.
        clock: Time and waiting.
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
        self._links: dict[str, _Link] = {}
        self._retired: set[_Link] = set()
        self._rests: dict[str, Rest] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    @property
    def servers(self) -> tuple[ServerInfo, ...]:
        """What each replica said at its handshake."""
        return tuple(link.replica.info for link in self._links.values())

    @property
    def rests(self) -> Mapping[str, Rest]:
        """How long each address is left alone, also those never reached."""
        return self._rests

    async def add_all(self, addresses: Sequence[str]) -> None:
        """Shakes hands with servers, waiting for those that are still starting.

        Raises:
            SetupError: One does not answer in time, or they do not fit; none is added then.
        """
        links: dict[str, _Link] = {}

        async def add(address: str) -> None:
            links[address] = await self._connect(address, self._deadlines)

        try:
            await concurrently([add(address) for address in addresses])
            check([*self.servers, *(links[a].replica.info for a in addresses)], self._requirements)
        except BaseException:
            for link in links.values():
                await link.channel.close()
            raise
        self._links.update((address, links[address]) for address in addresses)

    async def add_reachable(self, addresses: Iterable[str]) -> list[SetupError]:
        """The same for servers of which some may be away; returns why those are not added."""

        async def add(address: str) -> SetupError | None:
            try:
                await self._shake_hands_once(address)
            except ReplicaUnavailableError as away:
                return SetupError(str(away))
            return None

        results = await concurrently([add(address) for address in addresses])
        return [result for result in results if result is not None]

    async def reach(self, address: str) -> Replica:
        """Returns a replica, after its handshake if it is new: one call, no waiting for it.

        Raises:
            ReplicaUnavailableError: It does not answer, or it does not fit.
        """
        if (link := self._links.get(address)) is not None:
            return link.replica
        try:
            return await self._shake_hands_once(address)
        except SetupError as misfit:
            self._rests[address].until = math.inf
            _log.warning("replica %s is not used: %s", address, misfit)
            raise ReplicaUnavailableError(f"{address} is not used: {misfit}") from misfit

    @asynccontextmanager
    async def calling(self, replica: Replica) -> AsyncIterator[None]:
        """Keeps the replica's channel open for as long as the block lasts."""
        link = next(
            link for link in (*self._links.values(), *self._retired) if link.replica is replica
        )
        link.num_calls += 1
        try:
            yield
        finally:
            link.num_calls -= 1
            await self._close_if_done(link)

    async def retire(self, address: str) -> None:
        """Forgets a replica. Idempotent."""
        self._rests.pop(address, None)
        self._locks.pop(address, None)
        if (link := self._links.pop(address, None)) is not None:
            link.retired = True
            self._retired.add(link)
            await self._close_if_done(link)

    async def aclose(self) -> None:
        """Closes every channel."""
        for link in (*self._links.values(), *self._retired):
            await link.channel.close()

    async def _close_if_done(self, link: _Link) -> None:
        if link.retired and not link.num_calls:
            self._retired.discard(link)
            await link.channel.close()

    async def _shake_hands_once(self, address: str) -> Replica:
        async with self._locks.setdefault(address, asyncio.Lock()):
            if (known := self._links.get(address)) is not None:
                return known.replica
            try:
                link = await self._connect(address, replace(self._deadlines, connect_s=0.0))
            except SetupError as away:
                raise ReplicaUnavailableError(str(away)) from away
            try:
                check([*self.servers, link.replica.info], self._requirements)
            except SetupError:
                await link.channel.close()
                raise
            self._links[address] = link
            return link.replica

    async def _connect(self, address: str, deadlines: RpcDeadlines) -> _Link:
        channel = self._security.open(address)
        try:
            replica = await Replica.shake_hands(
                address,
                channel,
                rest=self._rests.setdefault(address, Rest()),
                metadata=self._security.metadata,
                deadlines=deadlines,
                retry=self._retry,
                clock=self._clock,
                client=self._client,
            )
        except BaseException:
            await channel.close()
            raise
        return _Link(replica, channel)
