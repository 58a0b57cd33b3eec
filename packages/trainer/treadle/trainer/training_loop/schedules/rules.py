"""The rules of the schedules whose rollouts run beside training: overlap, stream and async.

| schedule | a group may start | a step trains on |
|---|---|---|
| overlap | when the step before its own has begun to train | the rows of its step, all ended |
| stream | while untrained < (1 + surplus) x B | the oldest B groups that have ended |
| async | while untrained < (1 + max_staleness) x B | the same, where no group becomes too old |

B is `data.prompts_per_step`. The rule of async is AReaL's capacity (arXiv:2505.24298, section 5.1)
in whole groups: started <= (v + 1 + max_staleness) x B, and v x B of them are trained.

That alone does not bound the staleness of a straggler, so async also keeps this invariant: with s
the next step, for every k >= 0 at most (k + 1) x B untrained groups must be trained on by step
s + k. A batch that would break it for the steps after it waits for older groups. Then no group is
trained on with a staleness above max_staleness.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treadle.trainer.training_loop.schedules.group_queue import GroupQueue

__all__ = ["AsyncRule", "OverlapRule", "StreamRule"]


@dataclass(frozen=True, slots=True)
class OverlapRule:
    """The rows of step s + 1 are sampled while step s trains."""

    leaves_out = False

    def may_start(self, queue: GroupQueue) -> bool:
        """Returns whether the step before that of the next group has begun to train."""
        return queue.next_number // queue.size + 1 <= queue.next_step

    def batch(self, queue: GroupQueue) -> Sequence[int] | None:
        """Returns the groups of the next step's rows when all of them have ended."""
        first = (queue.next_step - 1) * queue.size
        numbers = range(first, first + queue.size)
        return numbers if all(number in queue.waiting for number in numbers) else None


@dataclass(frozen=True, slots=True)
class StreamRule:
    """A step trains on the groups that end first; the others are carried over.

    Attributes:
        surplus: How many more groups are started than a step needs, as a share of it.
    """

    surplus: float
    leaves_out = True

    def may_start(self, queue: GroupQueue) -> bool:
        """Returns whether fewer groups than wanted are untrained."""
        return queue.num_untrained < queue.size + math.ceil(self.surplus * queue.size)

    def batch(self, queue: GroupQueue) -> Sequence[int] | None:
        """Returns the oldest groups that have ended, if they fill a step."""
        return _oldest(queue)


@dataclass(frozen=True, slots=True)
class AsyncRule:
    """Rollouts never stop while staleness stays within its bound."""

    max_staleness: int
    leaves_out = True

    def may_start(self, queue: GroupQueue) -> bool:
        """Returns whether a group that starts now can be trained on in time."""
        return queue.num_untrained < (1 + self.max_staleness) * queue.size

    def batch(self, queue: GroupQueue) -> Sequence[int] | None:
        """Returns the oldest groups that have ended, unless older ones would become too old."""
        if len(queue.waiting) < queue.size:
            return None
        # Counted by birth: there are thousands of groups, and few births. They are sorted once
        # there is a batch, not for each group that ends before.
        waiting = Counter(group.birth for group in queue.waiting.values())
        untrained = Counter(queue.running.values()) + waiting
        for k in range(self.max_staleness + 1):
            # Born by this version: to be trained on by step `next_step + k`.
            last = queue.next_step + k - 1 - self.max_staleness
            due = _born_by(last, untrained)
            # A run that is resumed with a lower bound may have more: then a whole batch of them.
            needed = min(queue.size, due - k * queue.size)
            if _born_by(last, waiting) < needed:  # the batch has the oldest of them
                return None
        return _oldest(queue)


def _oldest(queue: GroupQueue) -> list[int] | None:
    """Returns the oldest groups that have ended; None if they do not fill a step."""
    if len(queue.waiting) < queue.size:
        return None
    return queue.by_age(queue.waiting)[: queue.size]


def _born_by(version: int, births: Mapping[int, int]) -> int:
    """Returns the number of groups that began with this version or an older one."""
    return sum(number for birth, number in births.items() if birth <= version)
