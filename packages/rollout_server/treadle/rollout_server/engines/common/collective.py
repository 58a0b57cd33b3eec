"""Collective transport, the receiving side: a worker, and the buckets that it is sent.

Invariant: all members make the same list of buckets of one announcement (`schedule`) and take
part in them in that order, each exactly once. At most two buckets exist on a worker: one that
is being written into the weights, one that is on its way.

Nobody waits in a circle: the first bucket of the list that is not yet everywhere is waited for
by everyone, and its sender waits for nothing but its own earlier buckets and the ranks that
share its layers.

Lifecycle: the group is made when an update names it and kept for the updates after it, since
making one can take longer than an update. It ends by the first failure of any member, by an
update that names another one, or by `close`, and never comes back: the trainer gives the next
one another name, which counts generations. A member that died, or came, is a new generation.

Who waits: a worker for all members to come, then for each bucket; `collective_group.py` says
what ends these waits.

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
from treadle.rollout_server.engines.common.collective_group import Membership, Stop
from treadle.rollout_server.engines.common.element_types import TORCH_DTYPES
from treadle.rollout_server.errors import CollectiveBroken

__all__ = ["CollectiveMember"]

Received = tuple[TensorSpec, torch.Tensor]


class CollectiveMember:
    """One worker of a server, in at most one group at a time.

    Args:
        worker: Its number among the server's workers.
        device: Where its weights are; "gloo" brings the bytes to host memory all the same.
    """

    def __init__(self, *, worker: int, device: torch.device) -> None:
        self._worker = worker
        self._device = device
        self._membership: Membership | None = None
        self._stop = Stop()

    def receive(
        self, group: CollectiveGroup, tensors: Sequence[TensorSpec]
    ) -> Generator[Received, None, None]:
        """As `receive_buckets`, tensor by tensor; each is good until the next is asked for."""
        buckets = self.receive_buckets(group, tensors)
        return (received for bucket in buckets for received in bucket)

    def receive_buckets(
        self, group: CollectiveGroup, tensors: Sequence[TensorSpec]
    ) -> Generator[list[Received], None, None]:
        """Takes part in one update; the tensors of each bucket, as it comes.

        They are good until the next bucket is asked for, which says that they were written: on
        CUDA, in the order of the asking thread's current stream at the latest. Run the iterator
        to its end; to close it before ends the group for everyone, as an error does.

        Args:
            group: The one of the update before goes on if it is the same.
            tensors: As announced; `group.senders[i]` sends `tensors[i]`.

        Raises:
            CollectiveBroken: From the iterator; the weights are a mixture.
        """
        self._stop = Stop()
        return self._receive(group, tuple(tensors), self._stop)

    def abort(self, cause: str) -> None:
        """Ends the update that is under way, from any thread; nothing if there is none."""
        self._stop.set(cause)

    def close(self) -> None:
        """Leaves the group. Idempotent; not while an update is under way."""
        if self._membership is not None:
            self._membership.leave()
            self._membership = None

    def _receive(
        self, group: CollectiveGroup, tensors: tuple[TensorSpec, ...], stop: Stop
    ) -> Generator[list[Received], None, None]:
        try:
            membership = self._joined(group, stop)
            yield from _buckets(membership, tensors, stop)
            membership.written(stop)
        except RuntimeError as error:  # What torch raises for everything that can happen here.
            cause = self._cause(error)
            self._give_up(cause, at_fault=bool(stop.cause))
            raise CollectiveBroken(f"group {group.group_name!r}: {cause}") from error
        except BaseException:  # The iterator was closed.
            self._give_up(stop.cause or "it could not write what it received", at_fault=True)
            raise

    def _joined(self, group: CollectiveGroup, stop: Stop) -> Membership:
        if self._membership is None or self._membership.announced != group:
            self.close()
            rank = group.first_rank + self._worker
            self._membership = Membership(group, rank, self._device)
            self._membership.join(stop)
        return self._membership

    def _cause(self, error: RuntimeError) -> str:
        """What another member said before it left, rather than that a connection was closed."""
        if self._membership is not None:
            with suppress(RuntimeError):
                return self._membership.failure() or str(error)
        return str(error)

    def _give_up(self, cause: str, *, at_fault: bool) -> None:
        if self._membership is not None:
            self._membership.fail(cause, at_fault=at_fault)
            self.close()


def _buckets(
    membership: Membership, tensors: tuple[TensorSpec, ...], stop: Stop
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
            work = post(number + 1)  # Into the memory of the one before, which was written.
        yield [_received(memory[number % 2], part, tensors[part.index]) for part in bucket.parts]


def _new_bucket(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _received(memory: torch.Tensor, part: Part, spec: TensorSpec) -> Received:
    data = memory[part.start : part.start + part.num_bytes]
    return spec, data.view(TORCH_DTYPES[spec.element_type]).view(spec.shape)
