"""Collective transport: the weights are broadcast from the policy's ranks to all servers at once.

Data flow: the driver begins the update on all servers and names their group. Each sending rank
exports its weights, packs them into buckets, and broadcasts the buckets to all workers of all
servers (`collective_group.py`). When every worker has written everything, the driver commits.

Who waits for whom: a rank waits for all members to join, then for each of its own broadcasts. The
driver waits for all ranks. Nobody waits in a circle: workers take the buckets in the order of the
schedule, and the sender of the first bucket that is not everywhere yet waits only for its own
earlier buckets and for the other ranks of its stage, which wait only for it.

Lifecycle of a group: the first update with a set of servers makes it, and later updates keep it as
long as the servers are the same and nothing fails, because making one can take longer than an
update. Any failure ends it for all members. The next group has another name, which counts
generations, so that a member of an older group is never taken for a member of the new one.

Invariants: the members of a group are exactly the servers that have begun the update. So a server
that fails to begin ends the attempt for all, and a broadcast that fails is begun again, in a new
group of the servers that still answer. Between attempts the servers hold a mixture of versions and
sample nothing; the failure of the last attempt drops them.

Ranks in a group: first the senders by their rank in the policy, then the workers, server by server.
"""

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from treadle.policy.client.types import NamedTensor
from treadle.policy.config.weight_sync import CollectiveTransportConfig
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.errors import Outcome, WeightSyncError
from treadle.policy.weight_sync.payload import WeightSource, num_bytes, own_weights
from treadle.policy.weight_sync.update_round import UpdateRound
from treadle.rollout.collective_schedule import Bucket, schedule
from treadle.rollout.v1 import weight_sync_service_pb2 as pb

# The driver has no torch, so the rank's side imports torch and `collective_group` when it runs.
if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from treadle.policy.weight_sync.transports.collective_group import (
        GroupLost,
        Membership,
        RankStore,
    )

__all__ = ["CollectivePublisher", "CollectiveSender"]

_log = logging.getLogger(__name__)


# --- the driver's side ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generation:
    """One group and its members, on the driver's side.

    Attributes:
        rendezvous: `host:port` of the store at which the members meet.
        senders: Ranks of the policy, [number of senders].
        num_workers: Workers per server, [number of servers].
    """

    name: str
    rendezvous: str
    servers: tuple[WeightSyncClient, ...]
    senders: tuple[int, ...]
    num_workers: tuple[int, ...]

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """Rank of the first worker per server, [number of servers], then the group's size."""
        return tuple(accumulate(self.num_workers, initial=len(self.senders)))

    def servers_of(self, ranks: Sequence[int]) -> list[str]:
        """Returns the names of the servers whose workers have one of these ranks."""
        first = self.first_ranks
        return [
            server.name
            for server, start, stop in zip(self.servers, first, first[1:], strict=False)
            if any(start <= rank < stop for rank in ranks)
        ]


class CollectivePublisher:
    """The driver's end of the transport. Keeps the group from update to update."""

    def __init__(self) -> None:
        self._run = uuid.uuid4().hex[:8]
        self._number = 0
        self._generation: _Generation | None = None

    async def publish(
        self, update_round: UpdateRound, transport: CollectiveTransportConfig
    ) -> None:
        """Leaves in `update_round.live` the servers that sample from the version."""
        for attempt in range(update_round.config.max_push_attempts):
            update_round.update_id = uuid.uuid4().hex
            cause = await self._attempt(update_round, transport)
            if not cause:
                await update_round.commit()
                return
            last = attempt + 1 == update_round.config.max_push_attempts
            _log.warning("version %d, attempt %d: %s", update_round.version, attempt + 1, cause)
            await self._end(update_round, cause if last else None)

    async def _attempt(
        self, update_round: UpdateRound, transport: CollectiveTransportConfig
    ) -> str:
        """Returns why the live servers lack the weights; empty if they do not, or none is left."""
        generation = await self._current(update_round, transport)
        while update_round.live and not await _begin(update_round, generation, transport):
            await self._end(update_round, None)
            update_round.update_id = uuid.uuid4().hex
            generation = await self._current(update_round, transport)
        if not update_round.live:
            return ""
        request = weights_pb.BroadcastRequest(
            group_name=generation.name,
            backend=transport.backend,
            rendezvous=generation.rendezvous,
            world_size=generation.first_ranks[-1],
            bucket_bytes=transport.bucket_bytes,
            element_type=update_round.element_type,
            timeout_s=transport.timeout_s,
        )
        async with update_round.renewing_leases():
            reports: list[weights_pb.BroadcastResponse]
            reports = await update_round.policy.call(request)
        cause = next((report.error for report in reports if report.error), "")
        lost = {rank for report in reports for rank in report.lost}
        left = f"left group {generation.name!r}: {cause}"
        names = generation.servers_of(sorted(lost))
        await update_round.remove_failed(
            {n: WeightSyncError(f"{n} {left}", Outcome.REPLACE) for n in names}
        )
        return cause

    async def _current(
        self, update_round: UpdateRound, transport: CollectiveTransportConfig
    ) -> _Generation:
        """Returns the group of the live servers: the current one, or else a new one."""
        kept = self._generation
        if kept is not None and kept.servers == tuple(update_round.live.values()):
            return kept
        infos = await update_round.call_all(lambda server: server.info())
        self._number += 1
        senders = tuple(sorted({spec.sender for spec in update_round.specs}))
        request = weights_pb.OpenGroupRequest(
            rank=senders[0],
            group_name=f"treadle-{self._run}-{self._number}",
            timeout_s=transport.timeout_s,
        )
        answers = await update_round.policy.call(request)
        self._generation = _Generation(
            name=request.group_name,
            rendezvous=answers[senders[0]].rendezvous,
            servers=tuple(update_round.live.values()),
            senders=senders,
            num_workers=tuple(infos[name].num_workers for name in update_round.live),
        )
        return self._generation

    async def _end(self, update_round: UpdateRound, cause: str | None) -> None:
        """Ends the group and its update.

        Servers that do not answer fail; if there is a `cause`, all fail.
        """
        self._generation = None

        async def abort(server: WeightSyncClient) -> None:
            try:
                await server.abort(update_round.update_id)
            except WeightSyncError as error:
                if error.outcome is not Outcome.RESTART:  # RESTART: the server has ended it already
                    raise

        await update_round.call_all(abort)
        names = tuple(update_round.live) if cause else ()
        await update_round.remove_failed(
            {n: WeightSyncError(f"{n}: {cause}", Outcome.REPLACE) for n in names}
        )


async def _begin(
    update_round: UpdateRound, generation: _Generation, transport: CollectiveTransportConfig
) -> bool:
    """Begins the update; returns whether every server of the group has begun."""
    first_ranks = dict(zip(update_round.live, generation.first_ranks, strict=False))

    async def begin(server: WeightSyncClient) -> None:
        request = update_round.begin_request()
        request.collective.CopyFrom(
            pb.CollectiveTransport(
                backend=transport.backend,
                rendezvous=generation.rendezvous,
                group_name=generation.name,
                world_size=generation.first_ranks[-1],
                first_rank=first_ranks[server.name],
                bucket_bytes=transport.bucket_bytes,
                senders=[generation.senders.index(spec.sender) for spec in update_round.specs],
            )
        )
        await update_round.with_retries(lambda: server.begin(request))

    async with update_round.renewing_leases():  # a server may wait long for its completions
        await update_round.call_all(begin)
    return tuple(update_round.live.values()) == generation.servers


# --- the rank's side -----------------------------------------------------------------------------


class CollectiveSender:
    """A rank's end of the transport, in at most one group at a time.

    Invariant: a sender broadcasts its own buckets of the schedule, in order, while it exports; the
    other ranks of its stage export along and send nothing. At most two buckets exist: one being
    sent and one being filled. A group that breaks is given up for good, but the export still runs
    to its end, since the other ranks are in it: a lost server costs an update, not the policy.

    Args:
        host: The address of this machine at which servers reach it.
    """

    def __init__(self, *, rank: int, host: str, device: "torch.device") -> None:
        self._rank = rank
        self._host = host
        self._device = device
        self._store: RankStore | None = None
        self._membership: Membership | None = None

    def open_group(self, request: weights_pb.OpenGroupRequest) -> weights_pb.OpenGroupResponse:
        """Returns where the group meets, if this rank serves the store."""
        from treadle.policy.weight_sync.transports.collective_group import RankStore

        if self._rank != request.rank:
            return weights_pb.OpenGroupResponse()
        if self._store is None:
            self._store = RankStore(self._host, timeout_s=request.timeout_s)
        self._store.announce(request.group_name, request.timeout_s)
        return weights_pb.OpenGroupResponse(rendezvous=self._store.address)

    def broadcast(
        self, policy: WeightSource, request: weights_pb.BroadcastRequest
    ) -> weights_pb.BroadcastResponse:
        """Sends this rank's weights. Every rank must call it."""
        from treadle.policy.weight_sync.transports.collective_group import GroupLost

        specs = policy.weight_specs()
        senders = sorted({spec.sender for spec in specs})
        weights = own_weights(policy, specs, self._rank)
        report = weights_pb.BroadcastResponse()
        if self._rank in senders:
            mine = senders.index(self._rank)
            plan = schedule(
                [num_bytes(spec, request.element_type) for spec in specs],
                [senders.index(spec.sender) for spec in specs],
                request.bucket_bytes,
            )
            buckets = [bucket for bucket in plan if bucket.sender == mine]
            try:
                membership = self._joined(request, num_senders=len(senders), rank=mine)
                _send(membership, buckets, weights, request.element_type)
                membership.wait_written()
                sent = sum(bucket.num_bytes for bucket in buckets)
                report = weights_pb.BroadcastResponse(num_bytes=sent)
            except GroupLost as error:
                cause, lost = self._explain(error)
                self._give_up(cause)
                report = weights_pb.BroadcastResponse(error=cause, lost=lost)
            except BaseException as error:
                self._give_up(f"{type(error).__name__}: {error}")
                raise
        for _ in weights:  # the export is collective: the other ranks are still in it
            pass
        return report

    def close(self) -> None:
        """Leaves the group. Idempotent."""
        if self._membership is not None:
            self._membership.leave()
            self._membership = None

    def _joined(
        self, request: weights_pb.BroadcastRequest, *, num_senders: int, rank: int
    ) -> "Membership":
        from treadle.policy.weight_sync.transports.collective_group import (
            CollectiveGroup,
            Membership,
        )

        group = CollectiveGroup(
            name=request.group_name,
            backend=request.backend,
            rendezvous=request.rendezvous,
            world_size=request.world_size,
            num_senders=num_senders,
            timeout_s=request.timeout_s,
        )
        if self._membership is None or self._membership.group != group:
            self.close()
            self._membership = Membership(group, rank, device=self._device, store=self._store)
            self._membership.join()
        return self._membership

    def _explain(self, error: "GroupLost") -> tuple[str, tuple[int, ...]]:
        """Returns the cause and the ranks at fault; a worker that failed has written both."""
        membership = self._membership
        if membership is None or error.missing:
            return str(error), error.missing
        return membership.failure() or str(error), membership.at_fault()

    def _give_up(self, cause: str) -> None:
        if self._membership is not None:
            self._membership.fail(cause)
            self.close()


@dataclass(slots=True)
class _Slot:
    """Memory of a bucket, and the broadcast that is reading it, if any."""

    memory: "Tensor"
    work: Any = None


def _send(
    membership: "Membership",
    buckets: Sequence[Bucket],
    weights: Iterator[tuple[int, NamedTensor]],
    element_type: str,
) -> None:
    import torch

    largest = max(bucket.num_bytes for bucket in buckets)
    dtype: torch.dtype = getattr(torch, element_type)
    slots = [_Slot(_new_bucket(largest, membership.device)) for _ in buckets[:2]]
    for number, bucket in enumerate(buckets):
        slot = slots[number % 2]
        if slot.work is not None:
            membership.wait(slot.work)
        for part in bucket.parts:
            room = slot.memory[part.start : part.start + part.num_bytes]
            tensor = next(weights)[1].tensor.detach()
            room.view(dtype).view(tensor.shape).copy_(tensor)
        slot.work = membership.broadcast(slot.memory[: bucket.num_bytes])
    for slot in slots:
        membership.wait(slot.work)


def _new_bucket(size: int, device: "torch.device") -> "Tensor":
    import torch

    return torch.empty(size, dtype=torch.uint8, device=device)
