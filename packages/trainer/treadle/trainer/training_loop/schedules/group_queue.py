"""The group queue: which groups run, which wait to be trained on, and which comes next.

A group has a number, from 0: its place in the data order. It is started, ends, and is trained on in
a step, or left out. Its birth is the version of the weights when it was started; its staleness in
step s is s - 1 - birth.

Invariants:

1. Groups are started in the order of their numbers, each once. A group that was started runs, waits
   to be trained on, is in the step that trains, was trained on, or was left out with a reason.
2. Groups are untrained while they run, wait, or are in the step that trains. The schedule (`Rule`)
   decides how many there may be, and which of them form the next batch.
3. `state` has all that a checkpoint must keep: `restore` of it continues with the same groups.

Pure: nothing here waits, samples or writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from treadle.trainer.training_loop.groups import Group

__all__ = ["GroupQueue", "QueueState", "Rule", "Waiting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A group that has ended and waits to be trained on.

    Attributes:
        birth: Version of the weights when it was started.
    """

    number: int
    birth: int
    group: Group


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """The part of a queue that a checkpoint keeps.

    Attributes:
        untrained: Numbers of the groups that were started and neither trained on nor left out.
    """

    next_number: int
    untrained: tuple[int, ...] = ()

    def as_json(self) -> Mapping[str, object]:
        """Returns it as the checkpoint has it."""
        return {"next": self.next_number, "untrained": list(self.untrained)}

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> Self:
        """Returns what `as_json` wrote."""
        return cls(next_number=written["next"], untrained=tuple(written["untrained"]))


class Rule(Protocol):
    """A schedule, as the rule for when a group starts and when a batch is formed."""

    @property
    def leaves_out(self) -> bool:
        """Whether a group that cannot be trained on makes room for the next one.

        Otherwise it keeps its place in the batch of its step.
        """
        ...

    def may_start(self, queue: GroupQueue) -> bool:
        """Returns whether the next group may start now."""
        ...

    def batch(self, queue: GroupQueue) -> Sequence[int] | None:
        """Returns the numbers of the groups that the next step trains on; None: not yet."""
        ...


@dataclass(slots=True, kw_only=True)
class GroupQueue:
    """The groups of a run whose rollouts continue beside training.

    Attributes:
        size: Number of groups that a step trains on.
        total_steps: Number of the last step; no group is started that no step would train on.
        version: Number of steps whose weights the servers have.
        waiting: Number -> the group that has ended.
        training: Number of groups in the step that trains; 0: none does.
    """

    rule: Rule
    size: int
    total_steps: int
    version: int = 0
    next_number: int = 0
    running: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, Waiting] = field(default_factory=dict)
    training: int = 0

    @property
    def next_step(self) -> int:
        """Number of the step whose batch is formed next."""
        return self.version + (2 if self.training else 1)

    @property
    def num_untrained(self) -> int:
        """Number of groups that run, wait, or are in the step that trains."""
        return len(self.running) + len(self.waiting) + self.training

    def may_start(self) -> bool:
        """Returns whether the next group may start now."""
        left = (self.total_steps - self.version) * self.size
        return self.num_untrained < left and self.rule.may_start(self)

    def start(self) -> int:
        """Starts the next group; returns its number. Only while `may_start`."""
        assert self.may_start()
        number, self.next_number = self.next_number, self.next_number + 1
        self.running[number] = self.version
        return number

    def end(self, number: int, group: Group) -> Waiting:
        """Moves a group that runs to those that wait."""
        ended = Waiting(number=number, birth=self.running.pop(number), group=group)
        self.waiting[number] = ended
        return ended

    def leave_out(self, number: int) -> Waiting:
        """Takes out a group that waits, for good."""
        return self.waiting.pop(number)

    def form(self) -> list[Waiting] | None:
        """Takes out the groups of the next step, oldest first; None: they have not ended yet."""
        assert not self.training, "a step ends before the next one begins"
        numbers = self.rule.batch(self)
        if numbers is None:
            return None
        batch = [self.waiting.pop(number) for number in numbers]
        # A batch with empty places counts as a whole one: its step is trained once.
        self.training = self.size
        return batch

    def published(self, version: int) -> None:
        """The step that trained is over, and the servers have its weights."""
        self.version, self.training = version, 0

    def state(self) -> QueueState:
        """Returns what a checkpoint keeps; not while a step trains."""
        assert not self.training
        return QueueState(
            next_number=self.next_number,
            untrained=tuple(sorted((*self.running, *self.waiting))),
        )

    def restore(self, state: QueueState, kept: Mapping[int, Waiting]) -> list[int]:
        """Continues with the groups of a checkpoint.

        Args:
            kept: Groups that had ended, as they were stored.

        Returns:
            Numbers of the groups that begin again from their row, oldest first.
        """
        self.next_number = state.next_number
        self.waiting = {number: kept[number] for number in state.untrained if number in kept}
        again = [number for number in state.untrained if number not in kept]
        self.running = dict.fromkeys(again, self.version)
        return again

    def by_age(self, numbers: Iterable[int]) -> list[int]:
        """Returns the numbers of groups that wait, oldest first."""
        return sorted(numbers, key=lambda number: (self.waiting[number].birth, number))
