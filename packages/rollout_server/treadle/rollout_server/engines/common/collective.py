"""Collective transport, the receiving side: a worker receives buckets of tensors.

Invariant: all members compute the same list of buckets from one announcement (`schedule`) and
take part in them in that order, each exactly once. A worker holds at most two buckets: one that
is being written into the weights and one that is in flight.

There is no deadlock: all members wait for the first bucket that has not arrived everywhere, and
its sender waits only for its own earlier buckets and the ranks that share its layers.

Lifecycle: a group is created when an update names it and kept for later updates, since creation
can take longer than an update. It ends at the first failure of any member, at an update that
names another group, or at `close`. An ended group is never reused: the trainer gives the next
one a new name with a generation number, as it does when a member died or joined.

Who waits: a worker waits for all members to join, then for each bucket; `collective_group.py`
lists what ends these waits.

Example, in a worker::

    member = CollectiveMember(worker=0, device=torch.device("cuda", 0))
    with closing(member.receive(group, tensors)) as received:
        for spec, tensor in received:
            parameters[spec.name].copy_(tensor)
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from treadle.rollout.collective_schedule import Part, schedule
from treadle.rollout_server.engine import CollectiveGroup, TensorSpec
from treadle.rollout_server.engines.common.collective_group import GroupMember, StopSignal
from treadle.rollout_server.engines.common.element_types import TORCH_DTYPES
from treadle.rollout_server.errors import CollectiveBroken

__all__ = ["CollectiveMember"]

Received = tuple[TensorSpec, torch.Tensor]


class CollectiveMember:
    """One worker of a server, a member of at most one group at a time.

    Args:
        worker: Index among the server's workers.
        device: Device of its weights; "gloo" receives into host memory regardless.
    """

    def __init__(self, *, worker: int, device: torch.device) -> None:
        self._worker = worker
        self._device = device
        self._membership: GroupMember | None = None
        self._stop = StopSignal()

    def receive(
        self, group: CollectiveGroup, tensors: Sequence[TensorSpec]
    ) -> Generator[Received, None, None]:
        """Yields tensors instead of buckets; each is valid until the next is requested."""
        buckets = self.receive_buckets(group, tensors)
        return (received for bucket in buckets for received in bucket)

    def receive_buckets(
        self, group: CollectiveGroup, tensors: Sequence[TensorSpec]
    ) -> Generator[list[Received], None, None]:
        """Takes part in one update; yields the tensors of each bucket when it arrives.

        They are valid until the next bucket is requested; the request confirms that they are
        written, on CUDA at the latest in the order of the calling thread's current stream. Run
        the iterator to its end: closing it early ends the group for everyone, as an error does.

        Args:
            group: The group; reused if it is the same as in the previous update.
            tensors: The announced tensors; `group.senders[i]` sends `tensors[i]`.

        Raises:
            CollectiveBroken: Raised by the iterator; the weights are a mixture.
        """
        self._stop = StopSignal()
        return self._receive(group, tuple(tensors), self._stop)

    def abort(self, cause: str) -> None:
        """Ends the running update, from any thread; does nothing if there is none."""
        self._stop.set(cause)

    def close(self) -> None:
        """Leaves the group. Idempotent; must not be called during an update."""
        if self._membership is not None:
            self._membership.leave()
            self._membership = None

    def _receive(
        self, group: CollectiveGroup, tensors: tuple[TensorSpec, ...], stop: StopSignal
    ) -> Generator[list[Received], None, None]:
        try:
            membership = self._joined(group, stop)
            yield from _buckets(membership, tensors, stop)
            membership.written(stop)
        except RuntimeError as error:  # torch raises it for every failure here.
            cause = self._cause(error)
            self._give_up(cause, at_fault=bool(stop.cause))
            raise CollectiveBroken(f"group {group.group_name!r}: {cause}") from error
        except BaseException:  # The iterator was closed.
            self._give_up(stop.cause or "it could not write what it received", at_fault=True)
            raise

    def _joined(self, group: CollectiveGroup, stop: StopSignal) -> GroupMember:
        if self._membership is None or self._membership.announced != group:
            self.close()
            rank = group.first_rank + self._worker
            self._membership = GroupMember(group, rank, self._device)
            self._membership.join(stop)
        return self._membership

    def _cause(self, error: RuntimeError) -> str:
        """Prefers the cause that another member recorded to the error of a lost connection."""
        if self._membership is not None:
            with suppress(RuntimeError):
                return self._membership.failure() or str(error)
        return str(error)

    def _give_up(self, cause: str, *, at_fault: bool) -> None:
        if self._membership is not None:
            self._membership.fail(cause, at_fault=at_fault)
            self.close()


def _buckets(
    membership: GroupMember, tensors: tuple[TensorSpec, ...], stop: StopSignal
) -> Iterator[list[Received]]:
    group = membership.announced
    plan = schedule([spec.size_bytes for spec in tensors], group.senders, group.bucket_bytes)
    largest = max(bucket.num_bytes for bucket in plan)
    memory = [_new_bucket(largest, membership.device) for _ in plan[:2]]

    def post(number: int) -> Any:
        flat = memory[number % 2][: plan[number].num_bytes]
        return membership.broadcast(plan[number].sender, flat)

    work = post(0)
    for number, bucket in enumerate(plan):
        membership.wait(work, stop)
        if number + 1 < len(plan):
            work = post(number + 1)  # Into the memory of the previous bucket, which is written.
        yield [_received(memory[number % 2], part, tensors[part.index]) for part in bucket.parts]


def _new_bucket(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _received(memory: torch.Tensor, part: Part, spec: TensorSpec) -> Received:
    data = memory[part.start : part.start + part.num_bytes]
    return spec, data.view(TORCH_DTYPES[spec.element_type]).view(spec.shape)
