"""The continuous rollout: takes tasks as they come, while the policy trains beside it.

Invariants:

1. Each task that was taken ends once, with one trajectory, whichever servers die meanwhile: a task
   that was in flight when the last server died, and one that failed while servers were replaced,
   is attempted again.
2. At most `rollout.max_in_flight` tasks per server are in flight; the next one is taken from the
   source when a slot is free (`RolloutRunner`). Only tasks that the source has given and not got
   back are held here.
3. Servers are replaced in `recover` only, which the caller calls while the policy holds the weights
   that the servers are to have. While the policy trains, its weights have no version.

Who waits: the intake for the source to have a task (woken by `look_again`); a rollout without a
server for `recover` or `serve_again`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from treadle.agent_loop import (
    AgentTask,
    SamplingParams,
    TokenGenerator,
    Trajectory,
)
from treadle.trainer.rollout.make_runner import Runner, RunnerSettings, Sink, SpanAttributes
from treadle.trainer.rollout.outages import failed_source
from treadle.trainer.rollout.rollout import (
    Rollout,
    failed_by,
    may_be_attempted_again,
    may_be_retried,
)

__all__ = ["ContinuousRollout"]

_TaskKey = tuple[str, int, int | None]
"""Key of a task with its seed: a small data set has the same row in two epochs at once."""


@dataclass(slots=True, kw_only=True)
class ContinuousRollout:
    """Runs the tasks of a source until it is cancelled.

    Attributes:
        rollout: Has the servers, loops, limits and reward.
        next_tasks: Returns tasks to run, or nothing if there is nothing to run now. It is called
            again after `look_again`.
        on_end: Takes each trajectory, once for each task.
        version: Returns the weight version of the servers.
        routed_experts: Whether trajectories have the experts of their rows.
        troubled: Set while `recover` has something to do.
        idle_s: Seconds in which a slot was free and the source had nothing to run.
    """

    rollout: Rollout
    sampling: SamplingParams
    next_tasks: Callable[[], Sequence[AgentTask]]
    on_end: Callable[[Trajectory], None]
    version: Callable[[], int]
    routed_experts: bool = False
    span_attributes: SpanAttributes | None = None
    troubled: asyncio.Event = field(default_factory=asyncio.Event)
    idle_s: float = 0.0
    _queued: deque[AgentTask] = field(default_factory=deque)
    _in_flight: dict[_TaskKey, AgentTask] = field(default_factory=dict)
    _failed: list[Trajectory] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _serving: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Runs tasks until it is cancelled.

        Raises:
            SetupError: A task names a loop that does not exist.
            Exception: The source or `on_end` raised it.
        """
        while True:
            await self._serving.wait()
            await self.rollout.run_until_lost(self, self._runner, self._keep)
            # It returns only when no server lives: what was in flight is attempted again.
            self._serving.clear()
            self._queued.extendleft(reversed(self._in_flight.values()))
            self._in_flight.clear()
            self.troubled.set()

    def look_again(self) -> None:
        """The source may have tasks now."""
        self._changed.set()

    def serve_again(self) -> None:
        """The servers are alive and hold the present weights."""
        self._serving.set()

    async def recover(self) -> None:
        """Replaces dead servers, waits for what else is down, and settles what has failed.

        Only while the policy holds the weights of `version`.

        Raises:
            NoServerLeftError: No server is left.
            OutageError: Something is down that the trajectories need.
            WeightSyncError: No restarted server took the weights, and no other is left.
            SetupError: A restarted server does not fit.
        """
        self.troubled.clear()
        disturbed = await self.rollout.servers.ensure_healthy()
        self.serve_again()
        serving = [
            source
            for source in self.rollout.down(self._failed, self._num_open)
            if await self.rollout.wait_for(
                source, failed_by(source, self._failed), self._attempt, self._settle_served
            )
        ]
        failed, self._failed = self._failed, []
        for trajectory in failed:
            source = failed_source(trajectory.error)
            if (disturbed and may_be_retried(trajectory)) or source in serving:
                self._queued.append(trajectory.task)
            elif self._may_be_down(source):
                self._failed.append(trajectory)
            else:
                self.on_end(trajectory)
        self.rollout.check_outages(failed)
        self.look_again()

    @property
    def _num_open(self) -> int:
        """Number of tasks that were taken and have not ended."""
        return len(self._in_flight) + len(self._queued) + len(self._failed)

    def _may_be_down(self, source: str | None) -> bool:
        """Returns whether trajectories in flight have still to show that a source is down."""
        limit = self.rollout.config.agent.max_consecutive_failures
        outages = self.rollout.outages
        return (
            source is not None
            and limit is not None
            and source in outages.served
            and source not in outages.given_up
            and 0 < outages.failures.get(source, 0) < limit
            and bool(self._in_flight)
        )

    def _runner(self, generator: TokenGenerator) -> Runner:
        settings = RunnerSettings(
            sampling=self.sampling,
            min_weight_version=self.version(),
            routed_experts=self.routed_experts,
        )
        return self.rollout.runner(generator, settings, span_attributes=self.span_attributes)

    async def _attempt(self, tasks: Sequence[AgentTask], sink: Sink) -> None:
        await self.rollout.run_until_lost(tasks, self._runner, sink)

    async def _settle_served(self, trajectory: Trajectory) -> None:
        """Ends the task with which it was tried whether a source serves again."""
        key = _key(trajectory.task)
        self._failed = [t for t in self._failed if _key(t.task) != key]
        self.rollout.outages.count(trajectory)
        self.on_end(trajectory)

    async def _keep(self, trajectory: Trajectory) -> None:
        del self._in_flight[_key(trajectory.task)]
        self.rollout.outages.count(trajectory)
        if may_be_attempted_again(trajectory):
            self._failed.append(trajectory)
            self.troubled.set()
        else:
            self.on_end(trajectory)
            if self._failed:  # it may have been the last that could show whether a source is down
                self.troubled.set()

    def __aiter__(self) -> "ContinuousRollout":
        return self

    async def __anext__(self) -> AgentTask:
        """Returns the next task, when there is one."""
        while not self._queued:
            self._changed.clear()
            self._queued.extend(self.next_tasks())
            if not self._queued:
                began = time.perf_counter()
                try:
                    await self._changed.wait()
                finally:
                    self.idle_s += time.perf_counter() - began
        task = self._queued.popleft()
        self._in_flight[_key(task)] = task
        return task


def _key(task: AgentTask) -> _TaskKey:
    return task.task_id, task.rollout_index, task.seed
