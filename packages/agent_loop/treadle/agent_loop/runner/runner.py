"""The runner: many tasks, a bounded number at a time, exactly one trajectory per task.

Invariants:

1. The sink gets exactly one trajectory per task taken, in the order in which they end.
2. A task is taken only while fewer than `max_in_flight` are in flight. A task counts until the
   sink has taken its trajectory, so a slow sink stops the intake. This is the backpressure. The
   bound may change meanwhile; where it falls, tasks in flight end, and none takes their slots.
3. The sink is called by one task at a time.
4. A failed attempt does not affect other tasks; the failure policy decides whether it ends the
   run. The deadline covers all attempts of a task; a task that passes it is cancelled and fails.
5. When `run` returns or raises, none of its tasks is left, also after a cancellation.
6. A trajectory in which nothing happens for `watchdog_s` is reported and continues (`watchdog`).

Who waits: the intake for a free slot (woken when the sink returns, or the bound rises), attempts
for their generator and tools (bounded by the deadline), finished attempts for the sink.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from treadle.agent_loop.aio import sole_cause
from treadle.agent_loop.clock import Clock
from treadle.agent_loop.errors import (
    LoopError,
    RewardError,
    RolloutError,
    TrajectoryTimeoutError,
    boundary,
)
from treadle.agent_loop.loops.loop import Services, scores_itself
from treadle.agent_loop.loops.registry import LoopRegistry
from treadle.agent_loop.runner.failure_policy import FailurePolicy, Verdict
from treadle.agent_loop.runner.task_slots import TaskSlots
from treadle.agent_loop.runner.watchdog import Watchdog
from treadle.agent_loop.span_content import messages_content, trajectory_output
from treadle.agent_loop.trajectory import Finding, Score, Trajectory
from treadle.agent_loop.types import AgentTask, StopReason
from treadle.agent_loop.user_calls import call_user
from treadle.tracing import span, use_attributes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A summary of a run.

    Attributes:
        num_tasks: Number of tasks; each gave one trajectory.
        num_failed: Number of trajectories with stop ERROR.
        num_retries: Number of attempts that were discarded and repeated.
        num_sampled_tokens: Number of sampled tokens over all trajectories that did not fail.
        wall_s: Duration of the run in seconds.
        stops: Number of trajectories per stop reason.
        errors: Number of failed attempts per type of error, with the first message.
        findings: Number of findings per kind (`Trajectory.findings`), with the first text.
    """

    num_tasks: int
    num_failed: int
    num_retries: int
    num_sampled_tokens: int
    wall_s: float
    stops: Mapping[StopReason, int]
    errors: Mapping[str, tuple[int, str]]
    findings: Mapping[str, tuple[int, str]]


class RolloutRunner:
    """Runs tasks with the loops that they name.

    Args:
        loops: By name; `LoopRegistry.opened` opens those that need it, around `run`.
        services: Passed to every loop, with the task's own deadline and pulse.
        max_in_flight: Maximum number of tasks in flight; 0: none begins until it is set higher.
        deadline_s: Time limit per task, including all its attempts and its reward.
        failure_policy: Decides what to do about a failed attempt.
        watchdog_s: Seconds without activity after which a trajectory is reported. None disables
            the watchdog.
        clock: The watchdog's clock; replaced in tests.
        span_attributes: Gives attributes to all spans of a task, for a source of tasks that
            differ in more than their rows. None: nothing.

    Raises:
        ValueError: `max_in_flight`, `deadline_s` or `watchdog_s` is out of range.
    """

    def __init__(
        self,
        loops: LoopRegistry,
        services: Services,
        *,
        max_in_flight: int,
        deadline_s: float,
        failure_policy: FailurePolicy,
        watchdog_s: float | None = None,
        clock: Clock | None = None,
        span_attributes: Callable[[AgentTask], Mapping[str, object]] | None = None,
    ) -> None:
        if not deadline_s > 0:
            raise ValueError(f"deadline_s is {deadline_s}; it must be above 0")
        self._loops = loops
        self._services = services
        self._running: set[TaskSlots] = set()  # of each run
        self.set_max_in_flight(max_in_flight)
        self._deadline_s = deadline_s
        self._failure_policy = failure_policy
        if watchdog_s is not None and not watchdog_s > 0:
            raise ValueError(f"watchdog_s is {watchdog_s}; it must be above 0, or None for none")
        self._watchdog_s = watchdog_s
        self._clock = clock
        self._span_attributes = span_attributes

    def set_max_in_flight(self, max_in_flight: int) -> None:
        """Changes the bound of each call of `run`; 0 lets no task begin.

        To be called on the event loop of the calls that are under way.

        Raises:
            ValueError: It is negative.
        """
        if max_in_flight < 0:
            raise ValueError(f"max_in_flight is {max_in_flight}; it must be at least 0")
        self._max_in_flight = max_in_flight
        for slots in self._running:
            slots.set_limit(max_in_flight)

    async def run(
        self,
        tasks: AsyncIterable[AgentTask] | Iterable[AgentTask],
        sink: Callable[[Trajectory], Awaitable[None]],
    ) -> RunReport:
        """Runs every task and passes its trajectory to the sink.

        Args:
            tasks: Taken one by one, each when a slot is free.

        Raises:
            RolloutError: An attempt failed and the failure policy returned RAISE.
            SetupError: A task names a loop that does not exist.
            Exception: The sink or the source of tasks raised it.
        """
        counts, watchdog = _Counts(), Watchdog(self._watchdog_s, clock=self._clock)
        slots = TaskSlots(self._max_in_flight)
        sink_lock = asyncio.Lock()

        async def attempt_and_deliver(task: AgentTask) -> None:
            try:
                trajectory = await self._settle(task, counts, watchdog)
                async with sink_lock:
                    await sink(trajectory)
                counts.deliver(trajectory)
            finally:
                slots.release()

        self._running.add(slots)
        try:
            async with AsyncExitStack() as stack, watchdog, asyncio.TaskGroup() as group:
                source = await _open_source(tasks, stack)
                while True:
                    await slots.acquire()
                    try:
                        task = await anext(source)
                    except BaseException as error:
                        slots.release()
                        if isinstance(error, StopAsyncIteration):
                            break
                        raise
                    group.create_task(attempt_and_deliver(task), name=f"task {task.task_id}")
        except BaseExceptionGroup as failures:
            first = sole_cause(failures)
            raise first from first.__cause__  # `from None` would cut off what caused it
        finally:
            self._running.discard(slots)
        return counts.report()

    async def _settle(self, task: AgentTask, counts: "_Counts", watchdog: Watchdog) -> Trajectory:
        """Attempts a task until the failure policy stops, and adds the watchdog's findings."""
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        given = {} if self._span_attributes is None else self._span_attributes(task)
        with (
            # Named as in verl, by whose names its users look for them.
            use_attributes(sample_index=task.sample_index, rollout_n=task.rollout_index, **given),
            watchdog.watch(f"task {task.task_id}, rollout {task.rollout_index}") as pulse,
        ):
            services = replace(self._services, deadline=deadline, pulse=pulse)
            trajectory = await self._until_settled(task, services, counts)
        stalls = (Finding(kind="stalled", text=text) for text in pulse.stalls)
        return replace(trajectory, findings=(*trajectory.findings, *stalls))

    async def _until_settled(
        self, task: AgentTask, services: Services, counts: "_Counts"
    ) -> Trajectory:
        attempt = 1
        while True:
            try:
                return await self._attempt(task, services, attempt)
            except RolloutError as error:
                counts.fail(error)
                match self._failure_policy.judge(error, attempt=attempt):
                    case Verdict.RAISE:
                        raise
                    case Verdict.RETRY:
                        attempt += 1
                        counts.num_retries += 1
                    case Verdict.DELIVER:
                        return Trajectory.failed(task, error)

    async def _attempt(self, task: AgentTask, services: Services, attempt: int) -> Trajectory:
        loop = self._loops.resolve(task.loop)
        timeout = asyncio.timeout_at(services.deadline)
        try:
            with span(
                "trajectory",
                task_id=task.task_id,
                rollout_index=task.rollout_index,
                loop=task.loop,
                attempt=attempt,
            ) as trace:
                if trace.recording:
                    trace.set(inputs={"messages": messages_content(task.messages)})
                async with timeout:
                    with boundary(LoopError, f"agent loop {task.loop!r}, task {task.task_id!r}"):
                        trajectory = _checked(await loop.run(task, services), task)
                    if scores_itself(loop):
                        _check_scored(trajectory)
                    services.pulse.beat("being scored")
                    trajectory = await self._score(trajectory)
                if trace.recording:
                    trace.set(
                        stop=trajectory.stop.value,
                        reward=trajectory.reward,
                        turns=trajectory.num_turns,
                        tokens=trajectory.num_sampled_tokens,
                        output=trajectory_output(trajectory, services),
                    )
                return trajectory
        except TimeoutError as late:
            # Only our own timer: a TimeoutError of the loop has become a LoopError above.
            raise self._late(task, getattr(late.__cause__, "__notes__", ())) from late
        except RolloutError as error:
            # The generator has the same deadline and may report it first.
            if asyncio.get_running_loop().time() < services.deadline:
                raise
            raise self._late(task, (str(error), *getattr(error, "__notes__", ()))) from error

    def _late(self, task: AgentTask, where: Iterable[str]) -> TrajectoryTimeoutError:
        doing = "; ".join(where)
        return TrajectoryTimeoutError(
            f"task {task.task_id!r}, rollout {task.rollout_index}, did not end within "
            f"{self._deadline_s:g} s" + (f": {doing}" if doing else "")
        )

    async def _score(self, trajectory: Trajectory) -> Trajectory:
        reward = self._services.reward
        if reward is None or trajectory.reward is not None or trajectory.stop is StopReason.ERROR:
            return trajectory
        with span("reward") as trace:
            with boundary(RewardError, f"reward of task {trajectory.task.task_id!r}"):
                score = Score.of(await call_user("the reward", partial(reward, trajectory)))
            trace.set(output={"value": float(score.value), "answer": score.answer})
        metrics = (*trajectory.metrics, *score.metrics)
        return replace(trajectory, reward=float(score.value), metrics=metrics, answer=score.answer)


def _checked(result: object, task: AgentTask) -> Trajectory:
    """Checks what a loop returned, so that a broken loop only fails its own attempt."""
    if not isinstance(result, Trajectory):
        raise TypeError(f"run() must return a Trajectory, got {result!r:.80}")
    given = result.task
    if (given.task_id, given.rollout_index) != (task.task_id, task.rollout_index):
        raise ValueError(
            f"run() must return a trajectory of its task, rollout {task.rollout_index}, got one "
            f"of task {given.task_id!r}, rollout {given.rollout_index}"
        )
    if given.seed != task.seed:  # it tells apart two attempts at a row, in two epochs at once
        return replace(result, task=replace(given, seed=task.seed))
    return result


def _check_scored(trajectory: Trajectory) -> None:
    """Raises if a loop that scores itself gave no reward, which no other can give."""
    if trajectory.reward is None and trajectory.error is None:
        task = trajectory.task
        raise LoopError(
            f"agent loop {task.loop!r} says scores_itself, and its trajectory of task "
            f"{task.task_id!r} has no reward: return one from run(), or leave scores_itself out"
        )


async def _open_source(
    tasks: AsyncIterable[AgentTask] | Iterable[AgentTask], stack: AsyncExitStack
) -> AsyncIterator[AgentTask]:
    """Returns an iterator over the tasks; an async generator is closed with the stack."""
    if not isinstance(tasks, AsyncIterable):
        tasks = _each(tasks)
    source = aiter(tasks)
    if (aclose := getattr(source, "aclose", None)) is not None:
        stack.push_async_callback(aclose)
    return source


async def _each(tasks: Iterable[AgentTask]) -> AsyncIterator[AgentTask]:
    for task in tasks:
        yield task


@dataclass(slots=True, kw_only=True)
class _Counts:
    """The counts of a run in progress."""

    started: float = field(default_factory=time.perf_counter)
    num_retries: int = 0
    num_sampled_tokens: int = 0
    stops: Counter[StopReason] = field(default_factory=Counter)
    errors: dict[str, tuple[int, str]] = field(default_factory=dict)
    findings: dict[str, tuple[int, str]] = field(default_factory=dict)

    def fail(self, error: RolloutError) -> None:
        _count(self.errors, type(error).__name__, str(error))

    def deliver(self, trajectory: Trajectory) -> None:
        self.stops[trajectory.stop] += 1
        self.num_sampled_tokens += trajectory.num_sampled_tokens
        for finding in trajectory.findings:
            _count(self.findings, finding.kind, finding.text)

    def report(self) -> RunReport:
        return RunReport(
            num_tasks=self.stops.total(),
            num_failed=self.stops[StopReason.ERROR],
            num_retries=self.num_retries,
            num_sampled_tokens=self.num_sampled_tokens,
            wall_s=time.perf_counter() - self.started,
            stops=dict(self.stops),
            errors=dict(self.errors),
            findings=dict(self.findings),
        )


def _count(counts: dict[str, tuple[int, str]], kind: str, text: str) -> None:
    count, first = counts.get(kind, (0, text))
    counts[kind] = (count + 1, first)
