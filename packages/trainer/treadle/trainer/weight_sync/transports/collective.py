"""Collective transport, the sending side: the weights of one rank, broadcast to all workers.

Invariant: a sender broadcasts its own buckets of the schedule, in order, while it exports; the
other ranks of its stage export along and send nothing. At most two buckets exist: one that is on
its way, one that is being filled. A group that breaks is given up for good, and the export is still
run to its end, since the other ranks are in it; so a lost server costs an update, not the policy.

Nobody waits in a circle. Workers take the buckets in the order of the schedule; the sender of the
first bucket that is not yet everywhere waits for nothing but its own earlier buckets and for the
ranks of its stage, which wait for nothing but it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from treadle.rollout.collective_schedule import Bucket, schedule
from treadle.trainer.policy.commands import Broadcast, BroadcastReport, OpenGroup
from treadle.trainer.policy.types import ElementType, NamedTensor
from treadle.trainer.weight_sync.payload import WeightSource, num_bytes
from treadle.trainer.weight_sync.transports.collective_group import (
    Group,
    GroupLost,
    Membership,
    RankStore,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CollectiveSender"]


class CollectiveSender:
    """One policy rank, in at most one group at a time.

    Args:
        rank: In the policy.
        host: The address of this machine at which servers reach it.
        device: Where the weights are.
    """

    def __init__(self, *, rank: int, host: str, device: torch.device) -> None:
        self._rank = rank
        self._host = host
        self._device = device
        self._store: RankStore | None = None
        self._membership: Membership | None = None

    def open_group(self, command: OpenGroup) -> str | None:
        """Where the group meets, if this is the rank to say."""
        if self._rank != command.rank:
            return None
        if self._store is None:
            self._store = RankStore(self._host, timeout_s=command.timeout_s)
        self._store.announce(command.group_name, command.timeout_s)
        return self._store.address

    def broadcast(self, policy: WeightSource, command: Broadcast) -> BroadcastReport:
        """Sends this rank's weights; every rank must call it."""
        specs = policy.weight_specs()
        senders = sorted({spec.sender for spec in specs})
        export = policy.export_weights()
        if self._rank not in senders:
            for _ in export:  # takes part in the others' gathering
                pass
            return BroadcastReport(num_bytes=0, error=None, lost=())
        mine = senders.index(self._rank)
        plan = schedule(
            [num_bytes(spec, command.element_type) for spec in specs],
            [senders.index(spec.sender) for spec in specs],
            command.bucket_bytes,
        )
        buckets = [bucket for bucket in plan if bucket.sender == mine]
        names = {spec.name for spec in specs if spec.sender == self._rank}
        tensors = (named for named in export if named.name in names)
        try:
            membership = self._joined(command, num_senders=len(senders), rank=mine)
            _send(membership, buckets, tensors, command.element_type)
            membership.wait_written()
        except GroupLost as error:
            cause, lost = self._why(error)
            self._give_up(cause)
            for _ in export:  # the others are still in it
                pass
            return BroadcastReport(num_bytes=0, error=cause, lost=lost)
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {error}")
            raise
        sent = sum(bucket.num_bytes for bucket in buckets)
        return BroadcastReport(num_bytes=sent, error=None, lost=())

    def close(self) -> None:
        """Leaves the group. Idempotent."""
        if self._membership is not None:
            self._membership.leave()
            self._membership = None

    def _joined(self, command: Broadcast, *, num_senders: int, rank: int) -> Membership:
        group = Group(
            name=command.group_name,
            backend=command.backend,
            rendezvous=command.rendezvous,
            world_size=command.world_size,
            num_senders=num_senders,
            timeout_s=command.timeout_s,
        )
        if self._membership is None or self._membership.group != group:
            self.close()
            self._membership = Membership(group, rank, device=self._device, store=self._store)
            self._membership.join()
        return self._membership

    def _why(self, error: GroupLost) -> tuple[str, tuple[int, ...]]:
        """Cause and culprit: what a worker said before it left, if one did."""
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
    """Memory of a bucket, and the broadcast that reads it."""

    memory: "Tensor"
    work: Any = None


def _send(
    membership: Membership,
    buckets: Sequence[Bucket],
    tensors: Iterator[NamedTensor],
    element_type: ElementType,
) -> None:
    largest = max(bucket.num_bytes for bucket in buckets)
    dtype: torch.dtype = getattr(torch, element_type)
    slots = [_Slot(_new_bucket(largest, membership.device)) for _ in buckets[:2]]
    for number, bucket in enumerate(buckets):
        slot = slots[number % 2]
        if slot.work is not None:
            membership.wait(slot.work)
        for part in bucket.parts:
            room = slot.memory[part.start : part.start + part.num_bytes]
            tensor = next(tensors).tensor.detach()
            room.view(dtype).view(tensor.shape).copy_(tensor)
        slot.work = membership.broadcast(slot.memory[: bucket.num_bytes])
    for slot in slots:
        membership.wait(slot.work)


def _new_bucket(size: int, device: torch.device) -> "Tensor":
    return torch.empty(size, dtype=torch.uint8, device=device)
