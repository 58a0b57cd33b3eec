"""A training run in simulated time: the schedules' own rules over simulated servers.

The rules (`schedules/rules.py`) and the queue of groups (`group_queue.py`) are those of a run, and
so is the router; servers, tools and sessions are `routing_sim`. A step of training takes
`train_s`, after which its weights reach the servers in `sync_s`; completions continue meanwhile, as
with `sync.in_flight=continue`. A server has at most `max_in_flight` sessions on average, as with
`rollout.max_in_flight`.

Means are over the steps from the second on, without the last two: the first one fills the queues,
and towards the end no group begins that no step would train on.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from routing_sim import Cost, Policy, Session, Simulation
from routing_trace import COMMON_TOKENS, GROUP_SIZE

from treadle.trainer.training_loop.groups import Group
from treadle.trainer.training_loop.schedules.group_queue import GroupQueue, Rule
from treadle.trainer.training_loop.schedules.rules import AsyncRule, OverlapRule, StreamRule

__all__ = ["SCHEDULES", "Run", "Training", "run_training"]

T = TypeVar("T")
_FIRST_COUNTED, _LAST_STEPS = 2, 2


class SyncRule:
    """Rollout and training take turns, as `run_sync` has it."""

    leaves_out = False

    def may_start(self, queue: GroupQueue) -> bool:
        """Returns whether the next group is of the step that samples."""
        return not queue.training and queue.next_number < (queue.version + 1) * queue.size

    def batch(self, queue: GroupQueue) -> Sequence[int] | None:
        """Returns the groups of the step's rows when all of them have ended."""
        return OverlapRule().batch(queue)


SCHEDULES: dict[str, Callable[[], Rule]] = {
    "sync": SyncRule,
    "overlap": OverlapRule,
    "stream": lambda: StreamRule(surplus=1.0),
    "async": lambda: AsyncRule(max_staleness=1),
}
"""By name; with half of all groups in the step that trains, the last two may run as many more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The settings of a run.

    Attributes:
        groups: That a step trains on.
        steps: Number of steps, at least 4.
        train_s: Seconds of the policy's update.
        sync_s: Seconds until the servers have the new weights.
        max_in_flight: Sessions under way, of all servers together.
    """

    groups: int
    steps: int
    train_s: float
    sync_s: float
    max_in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The results of a run.

    Attributes:
        trajectories_per_hour: Trained on.
        utilisation: Sequences that run over the places of all servers.
        idle: Share of the servers' time in which nothing ran.
        policy_waits: Share of the time in which the policy waited for a batch.
        staleness: Staleness of a group -> share of the trained groups.
        most_held: Greatest number of sessions that run, wait or are in the step that trains.
        most_held_tokens: Of all of them together.
        decisions: Of the schedule: may a group start, is there a batch.
        decision_s: CPU seconds that they took together.
    """

    trajectories_per_hour: float
    utilisation: float
    idle: float
    policy_waits: float
    staleness: dict[int, float]
    most_held: int
    most_held_tokens: int
    decisions: int
    decision_s: float


def run_training(
    rule: Rule,
    training: Training,
    trace: Sequence[Session],
    policy: Policy,
    *,
    cost: Cost,
    servers: int,
) -> Run:
    """Trains all steps; the trace has the sessions of all groups, those of a group adjacent."""
    return _Training(rule, training, trace, policy, cost=cost, servers=servers).train()


class _Decisions:
    """Times the schedule's own code."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def timed(self, decide: Callable[[], T]) -> T:
        begun = time.process_time_ns()
        answer = decide()
        self.seconds += (time.process_time_ns() - begun) * 1e-9
        self.count += 1
        return answer


class _Training(Simulation):
    """A simulation whose sessions are begun by a schedule."""

    def __init__(
        self,
        rule: Rule,
        training: Training,
        trace: Sequence[Session],
        policy: Policy,
        *,
        cost: Cost,
        servers: int,
    ) -> None:
        super().__init__(
            (),
            policy,
            cost=cost,
            num_engines=servers,
            max_in_flight=training.max_in_flight,
            common_tokens=COMMON_TOKENS,
        )
        self._training = training
        self._trace = trace
        self._queue = GroupQueue(rule=rule, size=training.groups, total_steps=training.steps)
        self._decisions = _Decisions()
        self._begun: list[Session] = []  # of the group that starts: they wait for a place
        self._left: dict[int, int] = {}  # group that runs -> sessions that have not ended
        self._in_flight = 0
        self._waits_since: float | None = 0.0
        self._waited_s = 0.0
        self._counted_s = 0.0
        self._staleness: Counter[int] = Counter()
        self._held: Counter[int] = Counter()  # group -> tokens of its sessions
        self._held_tokens = self._most_held = self._most_held_tokens = 0

    def train(self) -> Run:
        """Trains all steps."""
        self._fill()
        self._play()
        assert self._queue.version == self._training.steps, "every step has its batch"
        replay = self._replay()
        counted = sum(self._staleness.values())
        return Run(
            trajectories_per_hour=3600 * counted * GROUP_SIZE / self._counted_s,
            utilisation=replay.utilisation,
            idle=replay.idle,
            policy_waits=self._waited_s / self._counted_s,
            staleness={age: n / counted for age, n in sorted(self._staleness.items())},
            most_held=self._most_held * GROUP_SIZE,
            most_held_tokens=self._most_held_tokens,
            decisions=self._decisions.count,
            decision_s=self._decisions.seconds,
        )

    def _is_counted(self) -> bool:
        return _FIRST_COUNTED <= self._queue.version + 1 <= self._training.steps - _LAST_STEPS

    def _pass_time(self, when: float) -> None:
        if self._is_counted():
            self._counted_s += when - self._now
            if self._waits_since is not None:
                self._waited_s += when - self._now
        super()._pass_time(when)

    def _fill(self) -> None:
        """Begins sessions while places are free and the schedule has groups to start."""
        while self._in_flight < self._training.max_in_flight:
            if not self._begun:
                if not self._decisions.timed(self._queue.may_start):
                    return
                number = self._queue.start()
                first = number * GROUP_SIZE
                self._begun = list(self._trace[first : first + GROUP_SIZE])
                self._left[number] = GROUP_SIZE
                self._hold(number)
            session = self._begun.pop(0)
            self._in_flight += 1
            self._waiting.append(session)
            self._start_next()

    def _hold(self, number: int) -> None:
        self._held[number] = sum(
            COMMON_TOKENS + sum(turn.new_tokens + turn.sampled_tokens for turn in session.turns)
            for session in self._begun
        )
        self._held_tokens += self._held[number]
        self._most_held = max(self._most_held, len(self._held))
        self._most_held_tokens = max(self._most_held_tokens, self._held_tokens)

    def _session_ended(self, session: Session) -> None:
        self._in_flight -= 1
        number = session.index // GROUP_SIZE
        self._left[number] -= 1
        if not self._left[number]:
            del self._left[number]
            self._queue.end(number, Group(trajectories=()))
            self._take()
        self._fill()

    def _take(self) -> None:
        """Trains on the next batch, if the policy waits for it and the schedule has it."""
        if self._queue.training or self._queue.version == self._training.steps:
            return
        batch = self._decisions.timed(self._queue.form)
        if batch is None:
            return
        self._waits_since = None
        step = self._queue.version + 1
        if self._is_counted():
            self._staleness.update(step - 1 - waiting.birth for waiting in batch)
        numbers = [waiting.number for waiting in batch]

        def published() -> None:
            for number in numbers:
                self._held_tokens -= self._held.pop(number)
            self._queue.published(step)
            self._waits_since = self._now
            self._take()
            self._fill()

        self._at(self._now + self._training.train_s + self._training.sync_s, published)
        self._fill()
