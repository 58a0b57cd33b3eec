"""Rollouts beside training: the moves of the schedules overlap, stream and async.

Each of their steps: wait until the schedule's rule has a batch (`rules.py`), train on it, give the
servers the new weights, log. Meanwhile the rollout continues: it begins a group whenever the rule
allows it, and `sync.in_flight` decides how a trajectory in flight continues through new weights;
each token has the version that sampled it.

Invariants:

1. This task alone replaces servers and gives them weights, between the update and the next batch:
   then the policy's weights have `context.version`. The rollout itself never touches either.
2. A checkpoint has the state of the queue after its step (`GroupQueue.state`), so that a resume
   trains on every row that was begun and not trained on, once.

Who waits: `take` for groups that end (woken by each one, by trouble, and by the end of the
rollout).
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from treadle.agent_loop import AgentTask, Trajectory
from treadle.agent_loop.aio import sole_cause
from treadle.tracing import FinishedSpan
from treadle.trainer.report.trajectories import Recorded
from treadle.trainer.rollout.continuous import ContinuousRollout
from treadle.trainer.rollout.loops_from_config import sampling_params
from treadle.trainer.rollout.outages import OutageError
from treadle.trainer.rollout.shaping import shaped
from treadle.trainer.tracing.run_tracing import expect_traces
from treadle.trainer.training_loop.context import Timer, TrainingContext
from treadle.trainer.training_loop.gather import StepGroups, has_signal, note_failures
from treadle.trainer.training_loop.groups import Group, is_trainable
from treadle.trainer.training_loop.interruption import finished_first
from treadle.trainer.training_loop.run_record import Sampled
from treadle.trainer.training_loop.schedules.group_queue import GroupQueue, Rule, Waiting
from treadle.trainer.training_loop.schedules.group_store import GroupStore, versions
from treadle.trainer.training_loop.schedules.step import (
    save_interrupted,
    steps_of,
    train_step,
    validate_before_training,
)

__all__ = ["run_beside_training"]


async def run_beside_training(context: TrainingContext, rule: Rule, *, first_step: int) -> None:
    """Trains steps `first_step` to `context.total_steps`, while groups are sampled.

    Args:
        first_step: Number of the first step.

    Raises:
        Exception: See `run_sync`.
    """
    await validate_before_training(context, first_step=first_step)
    async with _begin(context, rule) as groups:
        for step in steps_of(context, first_step):
            timer = Timer()
            try:
                with timer.phase("rollout"):
                    found = await groups.take(step)
                work = train_step(context, step, found, timer, groups)
                await finished_first(work, say=context.record.show)
            except (asyncio.CancelledError, OutageError):
                if not groups.queue.training:
                    await save_interrupted(context, groups)
                raise


@contextlib.asynccontextmanager
async def _begin(context: TrainingContext, rule: Rule) -> "AsyncIterator[_Groups]":
    """Continues with the groups of the checkpoint, and samples until the block ends."""
    groups = _Groups(context=context, rule=rule)
    groups.restore()
    sampling = asyncio.create_task(groups.sample(), name="continuous rollout")
    sampling.add_done_callback(lambda _: groups.changed.set())
    groups.sampling = sampling
    try:
        yield groups
    finally:
        sampling.cancel()
        await asyncio.wait({sampling})
        await groups.store.flush()


@dataclass(slots=True)
class _Running:
    """The trajectories of a group that have ended, and its tasks."""

    tasks: Sequence[AgentTask]
    ended: list[Trajectory] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Groups:
    """The groups of a run, from the row to the batch."""

    context: TrainingContext
    rule: Rule
    queue: GroupQueue = field(init=False)
    store: GroupStore = field(init=False)
    rollout: ContinuousRollout = field(init=False)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    sampling: "asyncio.Task[None] | None" = None
    _again: list[int] = field(default_factory=list)
    _running: dict[int, _Running] = field(default_factory=dict)
    _numbers: dict[tuple[str, int, int | None], int] = field(default_factory=dict)
    _left_out: list[Waiting] = field(default_factory=list)
    _lost_in_a_row: int = 0
    _replaced: int = 0
    _lost: int = 0
    _recorded: Recorded | None = None
    _waits: bool = False
    _ending: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)

    def __post_init__(self) -> None:
        context, config = self.context, self.context.config
        self.queue = GroupQueue(
            rule=self.rule,
            size=config.data.prompts_per_step,
            total_steps=context.total_steps,
            version=context.version,
        )
        self.store = context.group_store
        self.rollout = ContinuousRollout(
            rollout=context.rollout,
            sampling=sampling_params(config, "rollout"),
            next_tasks=self._next_tasks,
            on_end=self._on_end,
            version=lambda: context.version,
            routed_experts=config.policy.moe.routing_replay,
            span_attributes=self._span_attributes,
        )

    # --- the moves of the schedule ---------------------------------------------------------------

    def restore(self) -> None:
        """Continues where the checkpoint was."""
        state = self.context.resumed_groups
        stored = {number: self.store.load(number) for number in state.untrained}
        kept = {number: group for number, group in stored.items() if group is not None}
        self._again = self.queue.restore(state, kept)
        self.store.remove_all_before(state.next_number, but=kept)
        if state.untrained:
            self.context.record.show(
                f"of the groups that were begun, {len(kept)} had ended and wait, "
                f"{len(self._again)} begin again"
            )

    async def sample(self) -> None:
        """Samples until it is cancelled."""
        with self.context.record.trajectory_log.recording() as recorded:
            self._recorded = recorded
            try:
                async with asyncio.TaskGroup() as self._ending:
                    await self.rollout.run()
            except BaseExceptionGroup as failures:
                first = sole_cause(failures)
                raise first from first.__cause__

    async def take(self, step: int) -> StepGroups:
        """Waits for the batch of a step.

        Returns:
            The batch. If too many groups in a row were lost to failures, these are returned, so
            that `survivors_of` raises with the cause.

        Raises:
            NoServerLeftError: No server is left.
            OutageError: Something is down that the trajectories need.
        """
        try:
            return await self._take(step)
        except OutageError:
            groups = [waiting.group for waiting in (*self.queue.waiting.values(), *self._left_out)]
            config = self.context.config
            running = [shaped(t, config) for group in self._running.values() for t in group.ended]
            ended = Sampled(trajectories=[*_members(groups), *running], spans=[])
            await self.context.record.sampled(step, ended, None)
            raise

    async def _take(self, step: int) -> StepGroups:
        size, samples = self.queue.size, self.context.config.rollout.samples_per_prompt
        await self.rollout.recover()
        with self.context.record.phase("rollout", total=size * samples):
            self.context.record.advance(min(size, len(self.queue.waiting)) * samples)
            self._waits = True
            try:
                while (batch := self.queue.form()) is None:
                    if self._too_many_lost:
                        groups = (waiting.group for waiting in self._left_out)
                        lost = [g for g in groups if not is_trainable(g, self.context.estimator)]
                        return StepGroups(groups=lost, trajectories=_members(lost))
                    await self._wait_for_change()
            finally:
                self._waits = False
        self.rollout.look_again()
        await self.store.trained(batch)
        return self._found(step, batch)

    def published(self, version: int) -> None:
        """The servers have the weights of a step."""
        self.queue.published(version)
        self.rollout.serve_again()
        self.rollout.look_again()

    async def kept_in_checkpoint(self) -> Mapping[str, object]:
        """Returns what the checkpoint of the step that was published has of the groups."""
        await self.store.flush()
        return self.queue.state().as_json()

    def checkpointed(self, step: int) -> None:
        """The checkpoint of a step is complete."""
        self.store.checkpointed(step)

    async def _wait_for_change(self) -> None:
        of_servers = asyncio.create_task(self.rollout.rollout.servers.wait_for_change())
        waits = [
            of_servers,
            *(asyncio.create_task(e.wait()) for e in (self.changed, self.rollout.troubled)),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self.changed.clear()
        if self.sampling is not None and self.sampling.done():
            self.sampling.result()
        if self.rollout.troubled.is_set() or of_servers.done():
            await self.rollout.recover()

    # --- what the rollout asks and tells ---------------------------------------------------------

    def _next_tasks(self) -> Sequence[AgentTask]:
        """Starts the next group, if the schedule allows it and not all of them fail."""
        if self._again:
            return self._start(self._again.pop(0))
        while not self._too_many_lost and self.queue.may_start():
            number = self.queue.start()
            self.context.batches = self.queue.next_number // self.queue.size
            self.context.batches += self.queue.next_number % self.queue.size > 0
            if (stored := self.store.load(number)) is None:
                return self._start(number)
            self.queue.running[number] = stored.birth
            self.queue.end(number, stored.group)
            self.changed.set()
        return ()

    def _start(self, number: int) -> Sequence[AgentTask]:
        tasks = self.context.group_tasks(number)
        self._running[number] = _Running(tasks)
        for task in tasks:
            self._numbers[task.task_id, task.rollout_index, task.seed] = number
        batch = number // self.queue.size + 1
        expect_traces(batch, (tasks[0].sample_index,))
        return tasks

    def _span_attributes(self, task: AgentTask) -> Mapping[str, object]:
        batch = self._number_of(task) // self.queue.size + 1
        return {"step": batch, "validate": False, "experiment_name": self.context.config.run.name}

    def _number_of(self, task: AgentTask) -> int:
        """Returns the group of a task; in a small data set two epochs may have its row at once."""
        return self._numbers[task.task_id, task.rollout_index, task.seed]

    def _on_end(self, trajectory: Trajectory) -> None:
        """Takes a trajectory; its group ends with the last one, once it is compared."""
        context, number = self.context, self._number_of(trajectory.task)
        context.record.firsts(self.queue.next_step, [trajectory])
        running = self._running[number]
        running.ended.append(trajectory)
        if len(running.ended) < len(running.tasks):
            return
        for task in running.tasks:
            del self._numbers[task.task_id, task.rollout_index, task.seed]
        running.ended.sort(key=lambda t: t.task.rollout_index)
        if context.rollout.compares:
            self._ending.create_task(self._compare(number))
        else:
            self._end(number, running.ended)

    async def _compare(self, number: int) -> None:
        rollout = self.context.rollout
        compared = await rollout.compared(self._running[number].ended)
        rollout.check_outages(compared)
        self._end(number, compared)

    def _end(self, number: int, trajectories: Sequence[Trajectory]) -> None:
        """Ends a group, so that a step can train on it."""
        context = self.context
        del self._running[number]
        members = [shaped(trajectory, context.config) for trajectory in trajectories]
        ended = self.queue.end(number, Group(trajectories=tuple(members)))
        if self.rule.leaves_out and self._is_left_out(ended.group):
            self._left_out.append(self.queue.leave_out(number))
        else:
            self._lost_in_a_row = 0
            self.store.save(ended)
            if self._waits:
                context.record.advance(len(members))
        self.changed.set()
        self.rollout.look_again()

    @property
    def _too_many_lost(self) -> bool:
        """Whether as many groups in a row were lost as a step may look at: then the run ends."""
        algorithm = self.context.config.algorithm
        batches = algorithm.max_generation_batches if self._samples_on else 1
        return self._lost_in_a_row >= self.queue.size * batches

    @property
    def _samples_on(self) -> bool:
        return self.context.config.algorithm.dynamic_sampling is not None

    def _is_left_out(self, group: Group) -> bool:
        """Returns whether the next row takes a group's place."""
        algorithm = self.context.config.algorithm
        if not is_trainable(group, self.context.estimator):
            self._lost += 1
            self._lost_in_a_row += 1
            return True
        by = algorithm.dynamic_sampling
        # A step looks at this many groups at most; then those without signal fill it.
        if by is None or len(self._left_out) >= (
            (algorithm.max_generation_batches - 1) * self.queue.size
        ):
            return False
        if has_signal(group, by=by):
            return False
        self._lost_in_a_row = 0
        self._replaced += 1
        return True

    # --- what a step is told ---------------------------------------------------------------------

    def _found(self, step: int, batch: Sequence[Waiting]) -> StepGroups:
        left_out, self._left_out = self._left_out, []
        if left_out:
            groups = [waiting.group for waiting in left_out]
            note_failures(self.context, step, groups, num_lost=self._lost)
        metrics = self._metrics(step, batch)
        trajectories = _members([waiting.group for waiting in (*batch, *left_out)])
        spans: Sequence[FinishedSpan] = ()
        if self._recorded is not None:
            spans = self._recorded.take(
                {(t.task.task_id, t.task.rollout_index) for t in trajectories}
            )
        self._lost = self._replaced = 0
        return StepGroups(
            groups=[waiting.group for waiting in batch],
            trajectories=trajectories,
            spans=list(spans),
            metrics=metrics,
        )

    def _metrics(self, step: int, batch: Sequence[Waiting]) -> dict[str, float]:
        ages = [step - 1 - waiting.birth for waiting in batch]
        mixed = [len(set(versions(t))) > 1 for t in _members([waiting.group for waiting in batch])]
        idle_s, self.rollout.idle_s = self.rollout.idle_s, 0.0
        metrics = {
            "data/batches": float(self.context.batches),
            "groups/running": float(len(self.queue.running)),
            "groups/waiting": float(len(self.queue.waiting)),
            "groups/carried_over": float(sum(age > 0 for age in ages)),
            "staleness/mean": sum(ages) / len(ages),
            "staleness/max": float(max(ages)),
            **{f"staleness/groups_{age}": float(n) for age, n in sorted(Counter(ages).items())},
            "staleness/mixed": sum(mixed) / len(mixed),
            "rollout/idle_s": idle_s,
        }
        if self.rule.leaves_out:
            metrics["sampling/groups_failed"] = float(self._lost)
        if self._samples_on:
            metrics["sampling/groups_replaced"] = float(self._replaced)
        return metrics


def _members(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]
