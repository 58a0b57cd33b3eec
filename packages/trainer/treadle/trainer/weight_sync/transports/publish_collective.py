"""Publishing through a collective group: Begin on all servers, one broadcast to all, Commit.

Lifecycle of a group: it is made by the first update with these servers and kept for the updates
after it, as long as the servers are the same ones and nothing fails; making one can take longer
than an update. Whatever fails ends it for all its members. The next one has another name, which
counts generations, so that a member of an older one cannot be taken for a member of it.

Invariant: a group's members are exactly the servers that have begun the update. So a server that
fails to begin ends the attempt for all, and a broadcast that fails is begun again, in a new group
of those that still answer. Between the attempts the servers hold a mixture and sample nothing; the
last one's failure drops them. A broadcast that succeeds has been written by every worker, so that
Commit comes when every server holds every byte, as with the other transports.

The ranks in a group: senders, by their rank in the policy, then the workers, server by server.
"""

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.trainer.config.schema import CollectiveTransportConfig
from treadle.trainer.policy.commands import Broadcast, BroadcastReport, OpenGroup
from treadle.trainer.weight_sync.client import WeightSyncClient
from treadle.trainer.weight_sync.errors import Outcome, WeightSyncError
from treadle.trainer.weight_sync.update_round import Round

__all__ = ["CollectivePublisher"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generation:
    """One group."""

    name: str
    rendezvous: str
    servers: tuple[WeightSyncClient, ...]
    senders: tuple[int, ...]
    """[number of senders], ranks of the policy."""
    num_workers: tuple[int, ...]
    """[number of servers]."""

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """[number of servers], and then the size of the group."""
        return tuple(accumulate(self.num_workers, initial=len(self.senders)))

    def servers_of(self, ranks: Sequence[int]) -> list[str]:
        """The names of the servers that these ranks are workers of."""
        first = self.first_ranks
        return [
            server.name
            for server, start, stop in zip(self.servers, first, first[1:], strict=False)
            if any(start <= rank < stop for rank in ranks)
        ]


class CollectivePublisher:
    """Keeps the group from update to update."""

    def __init__(self) -> None:
        self._run = uuid.uuid4().hex[:8]
        self._number = 0
        self._generation: _Generation | None = None

    async def publish(self, round_: Round, transport: CollectiveTransportConfig) -> None:
        """Leaves in `round_.live` the servers that sample from the version.

        Raises:
            WeightSyncError: trainer and servers do not fit.
            PolicyError: a policy rank failed.
        """
        for attempt in range(round_.config.max_push_attempts):
            round_.update_id = uuid.uuid4().hex
            cause = await self._attempt(round_, transport)
            if not cause:
                await round_.commit()
                return
            last = attempt + 1 == round_.config.max_push_attempts
            _log.warning("version %d, attempt %d: %s", round_.version, attempt + 1, cause)
            await self._end(round_, cause if last else None)

    async def _attempt(self, round_: Round, transport: CollectiveTransportConfig) -> str:
        """Why the servers that are left do not hold the weights; empty: they do, if any is left."""
        generation = await self._current(round_, transport)
        while round_.live and not await _begin(round_, generation, transport):
            await self._end(round_, None)
            round_.update_id = uuid.uuid4().hex
            generation = await self._current(round_, transport)
        if not round_.live:
            return ""
        command = Broadcast(
            group_name=generation.name,
            backend=transport.backend,
            rendezvous=generation.rendezvous,
            world_size=generation.first_ranks[-1],
            bucket_bytes=transport.bucket_bytes,
            element_type=round_.element_type,
            timeout_s=transport.timeout_s,
        )
        async with round_.renewing():
            reports = cast("list[BroadcastReport]", await round_.policy.call(command))
        cause = next((report.error for report in reports if report.error), "")
        lost = {rank for report in reports for rank in report.lost}
        left = f"left group {generation.name!r}: {cause}"
        names = generation.servers_of(sorted(lost))
        await round_.drop({n: WeightSyncError(f"{n} {left}", Outcome.REPLACE) for n in names})
        return cause

    async def _current(self, round_: Round, transport: CollectiveTransportConfig) -> _Generation:
        """The group of the live servers: the one there is, or else a new one."""
        kept = self._generation
        if kept is not None and kept.servers == tuple(round_.live.values()):
            return kept
        infos = await round_.on_all(lambda server: server.info())
        self._number += 1
        senders = tuple(sorted({spec.sender for spec in round_.specs}))
        command = OpenGroup(
            rank=senders[0],
            group_name=f"treadle-{self._run}-{self._number}",
            timeout_s=transport.timeout_s,
        )
        answers = await round_.policy.call(command)
        self._generation = _Generation(
            name=command.group_name,
            rendezvous=answers[senders[0]],
            servers=tuple(round_.live.values()),
            senders=senders,
            num_workers=tuple(infos[name].num_workers for name in round_.live),
        )
        return self._generation

    async def _end(self, round_: Round, cause: str | None) -> None:
        """Ends the group and its update; drops servers that do not answer, or, for a cause, all."""
        self._generation = None

        async def abort(server: WeightSyncClient) -> None:
            try:
                await server.abort(round_.update_id)
            except WeightSyncError as error:
                if error.outcome is not Outcome.RESTART:  # the server has ended it by itself
                    raise

        await round_.on_all(abort)
        names = tuple(round_.live) if cause else ()
        await round_.drop({n: WeightSyncError(f"{n}: {cause}", Outcome.REPLACE) for n in names})


async def _begin(
    round_: Round, generation: _Generation, transport: CollectiveTransportConfig
) -> bool:
    """Whether every server of the group has begun."""
    first_ranks = dict(zip(round_.live, generation.first_ranks, strict=False))

    async def begin(server: WeightSyncClient) -> None:
        request = round_.announcement()
        request.collective.CopyFrom(
            pb.CollectiveTransport(
                backend=transport.backend,
                rendezvous=generation.rendezvous,
                group_name=generation.name,
                world_size=generation.first_ranks[-1],
                first_rank=first_ranks[server.name],
                bucket_bytes=transport.bucket_bytes,
                senders=[generation.senders.index(spec.sender) for spec in round_.specs],
            )
        )
        await round_.answer(lambda: server.begin(request))

    async with round_.renewing():  # one may wait long for its completions to end
        await round_.on_all(begin)
    return tuple(round_.live.values()) == generation.servers
