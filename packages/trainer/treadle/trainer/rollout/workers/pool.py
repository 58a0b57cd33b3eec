"""The driver's end of the loop workers: hands out tasks, takes trajectories, replaces workers.

A runner's `run` takes tasks from its source (`_Run.hold`). A worker requests some, and `give`
hands them out; its `Ended` puts the trajectory into `_Run.ended`, from where the run passes it on.

Invariants:

1. Each task that a run took ends once, with one trajectory, whichever workers die meanwhile. The
   tasks of a worker that died are given to another, at most `agent.max_attempts` times in all; then
   they fail with `WorkerLostError`.
2. At most `max_in_flight` tasks of a run are in flight, over all workers; a task counts until the
   sink has taken its trajectory. No worker has more than it requested, nor more than its share of
   them, so that the first to request does not get all. So nothing here grows without a bound: only
   tasks in flight are held.
3. A worker whose process or connection ends, or that gives no sign of life for
   `rollout.unresponsive_s`, is lost. It is ended and started again in the background, as often as
   `agent.max_worker_restarts` allows in all. When none is left, the runs end with
   `NoWorkerLeftError`.
4. However a run ends, no worker keeps a task of it: each is notified, and cancels its tasks.

Who waits: a run's intake for a free place; its delivery for a trajectory; a task for a worker with
an open request, or that is started again. One asyncio task watches for signs of life.
"""

import asyncio
import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from treadle.agent_loop import AgentTask, Image, LoopError, Trajectory
from treadle.agent_loop.aio import concurrently
from treadle.agent_loop.rpc import Requirements
from treadle.agent_loop.rpc.driven import DrivenAccess
from treadle.agent_loop.runner.task_slots import TaskSlots
from treadle.loop_worker.v1 import loop_worker_service_pb2 as pb
from treadle.policy.client.signs_of_life import Silence
from treadle.tracing import (
    TraceSink,
    current_attributes,
    current_sink,
    current_span,
)
from treadle.trainer.config.schema import Config
from treadle.trainer.launch.process import Launcher, LostProcessError, ProcessError
from treadle.trainer.launch.supervision import Restarts
from treadle.trainer.rollout.make_runner import RunnerSettings, Sink, SpanAttributes
from treadle.trainer.rollout.server_pool import ServerPool
from treadle.trainer.rollout.server_security import server_security
from treadle.trainer.rollout.workers.messages import (
    RUNNER_SETTINGS,
    GivenTask,
    WorkerSettings,
    attributes_json,
    pack_given,
    read_spans,
)
from treadle.trainer.rollout.workers.plain_values import from_wire
from treadle.trainer.rollout.workers.router import RunRouter
from treadle.trainer.rollout.workers.trajectory_codec import (
    ImageNumbers,
    WorkerLostError,
    read_trajectory,
)
from treadle.trainer.rollout.workers.worker_process import LoopWorker, start_worker

__all__ = ["LoopWorkers", "NoWorkerLeftError", "loop_workers"]

_log = logging.getLogger(__name__)
_KILL_S = 0.5


class NoWorkerLeftError(ProcessError):
    """No loop worker is left; the message lists how each ended."""


class WorkerRunError(RuntimeError):
    """A worker cannot carry out a run; the message has its traceback."""


@dataclass(slots=True)
class _Held:
    """A task that was taken and has not ended."""

    given: GivenTask
    worker: LoopWorker | None = None
    num_lost: int = 0


@dataclass(slots=True, kw_only=True)
class _Run:
    """One call of `run` in progress.

    Attributes:
        runner: The runner whose `run` this is.
        held: Tasks that were taken and have not ended, by number.
        waiting: Numbers of held tasks that no worker has.
        ended: Number and trajectory of what the caller's sink has not taken yet; None: look whether
            the source has ended, or the run failed.
        rows: Number of held tasks by `task_id`.
        images: Images that trajectories show beside their task's, by `task_id` of held tasks, so
            that those of a group share them.
    """

    begin: pb.Begin
    runner: "_WorkersRunner"
    sink: TraceSink
    held: dict[int, _Held] = field(default_factory=dict)
    rows: Counter[str] = field(default_factory=Counter)
    images: defaultdict[str, dict[Image, Image]] = field(default_factory=lambda: defaultdict(dict))
    waiting: deque[int] = field(default_factory=deque)
    ended: "asyncio.Queue[tuple[int, Trajectory] | None]" = field(default_factory=asyncio.Queue)
    failure: Exception | None = None

    def hold(self, number: int, given: GivenTask) -> None:
        """Takes a task, which waits for a worker."""
        self.held[number] = _Held(given)
        self.rows[given.task.task_id] += 1
        self.waiting.append(number)

    def release(self, number: int) -> None:
        """Forgets a task that has ended; with the last of its row, the row's images."""
        row = self.held.pop(number).given.task.task_id
        self.rows[row] -= 1
        if not self.rows[row]:
            del self.rows[row]
            self.images.pop(row, None)

    def fail(self, error: Exception) -> None:
        """Ends the run with an error."""
        self.failure = self.failure or error
        self.ended.put_nowait(None)


class LoopWorkers:
    """Starts the workers of a run, gives them tasks, and ends them.

    Args:
        loops: Names of the loops that run the rows.
        images: Whether rows may have images.
    """

    def __init__(
        self,
        launcher: Launcher,
        config: Config,
        *,
        requirements: Requirements,
        loops: frozenset[str],
        images: bool,
    ) -> None:
        self._launcher = launcher
        self._config = config
        self._requirements = requirements
        self._loops = loops
        self._images = images
        self._access = DrivenAccess(tls=None if launcher.tls is None else launcher.tls.directory)
        self._settings: WorkerSettings | None = None
        self._live: dict[str, LoopWorker] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._runs: dict[int, _Run] = {}
        self._num_runs = self._num_started = 0
        self._restarts = Restarts(config.agent.max_worker_restarts, "agent.max_worker_restarts")
        self._ends: dict[str, str] = {}
        self._failure: Exception | None = None
        self._outbox: dict[tuple[LoopWorker, int], list[GivenTask]] = {}
        self._flush_due = False
        self._closing = False
        self._weights = 0
        self._wants_text: Callable[[], bool] = lambda: config.run.trajectories_max_bytes > 0

    async def start(self, router: str) -> None:
        """Starts all workers at once.

        Args:
            router: host:port of the routing service.

        Raises:
            ProcessError: One did not start, cannot be set up, or was lost again and again.
        """
        # Loads Arrow, which is not needed to read what a run is to be.
        from treadle.tracing.trajectories.schema import SNIPPET_CHARACTERS

        self._settings = WorkerSettings(
            config=self._config,
            router=router,
            security=server_security(self._config.rollout),
            requirements=self._requirements,
            loops=self._loops,
            images=self._images,
            response_characters=SNIPPET_CHARACTERS,
            directory=Path.cwd(),
        )
        names = [f"worker-{number}" for number in range(self._config.agent.num_workers)]
        await concurrently(map(self._start_first, names))
        self._watching = asyncio.create_task(self._watch(), name="watch the loop workers")

    async def __aenter__(self) -> Self:
        """Starts nothing yet."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Ends all workers."""
        self._closing = True
        tasks = [*self._starting.values()]
        if self._watching is not None:
            tasks.append(self._watching)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._live.values()))
        self._live = {}

    def follow(self, servers: ServerPool) -> None:
        """Keeps the workers from weights that are older than the pool's, from now on."""
        servers.on_change(lambda routes: self._require(routes.weight_version))

    def make_text_while(self, wanted: Callable[[], bool]) -> None:
        """Lets workers make the text of trajectories, for their files, only while it is wanted.

        Args:
            wanted: Asked whenever tasks are given; without it, the text is made if the run has
                trajectory files.
        """
        self._wants_text = wanted

    def _require(self, version: int) -> None:
        if version != self._weights:
            self._weights = version
            self._send_to_all(self._weights_command())

    def _weights_command(self) -> pb.Command:
        return pb.Command(weights=pb.Weights(version=self._weights))

    def _send_to_all(self, command: pb.Command) -> None:
        for worker in self._live.values():
            worker.send(command)

    def runner(
        self,
        settings: RunnerSettings,
        *,
        max_in_flight: int,
        span_attributes: SpanAttributes | None = None,
    ) -> "_WorkersRunner":
        """Returns what runs tasks on the workers.

        Args:
            max_in_flight: Maximum number of tasks in flight, over all workers.
            span_attributes: Gives attributes to all spans of a task; None: nothing.
        """
        return _WorkersRunner(self, settings, max_in_flight, span_attributes)

    def take_metrics(self) -> dict[str, float]:
        """Returns the number of workers now, and of losses and restarts since the last call."""
        return {"workers/live": float(len(self._live)), **self._restarts.take_metrics("workers")}

    def fail(self, error: Exception) -> None:
        """Ends all runs, now and later, with an error."""
        self._failure = self._failure or error
        for run in self._runs.values():
            run.fail(self._failure)

    def set_max_in_flight(self, runner: "_WorkersRunner") -> None:
        """Sends the changed bound of a runner to the workers."""
        for run in self._runs.values():
            if run.runner is runner:
                run.begin.max_in_flight = runner.max_in_flight
                bound = pb.Bound(run=run.begin.run, max_in_flight=runner.max_in_flight)
                self._send_to_all(pb.Command(bound=bound))

    def begin(self, runner: "_WorkersRunner") -> _Run:
        """Begins a run at all workers."""
        if self._failure is not None:
            raise self._failure
        self._num_runs += 1
        sink, parent = current_sink(), current_span()
        run = _Run(
            begin=pb.Begin(
                run=self._num_runs,
                settings=RUNNER_SETTINGS.dump_json(runner.settings),
                # Each may have all of them: the others may die.
                max_in_flight=runner.max_in_flight,
                recording=sink.recording,
                parent=None
                if parent is None
                else pb.Parent(trace_id=parent.trace_id, span_id=parent.span_id),
                attributes=attributes_json(current_attributes()),
            ),
            sink=sink,
            runner=runner,
        )
        self._runs[run.begin.run] = run
        self._send_to_all(pb.Command(begin=run.begin))
        return run

    def end(self, run: _Run) -> None:
        """Ends a run at all workers, which cancel what they have of it."""
        del self._runs[run.begin.run]
        for worker in self._live.values():
            worker.open_asks.pop(run.begin.run, None)
            worker.num_given.pop(run.begin.run, None)
        self._send_to_all(pb.Command(end=pb.End(run=run.begin.run)))

    def give(self, run: _Run) -> None:
        """Gives waiting tasks to workers that requested some: first to the one with the fewest."""
        number = run.begin.run
        share = math.ceil(run.begin.max_in_flight / max(1, len(self._live)))
        while run.waiting:
            asking = [
                worker
                for worker in self._live.values()
                if worker.open_asks[number] > 0 and worker.num_given[number] < share
            ]
            if not asking:
                return
            worker = min(asking, key=lambda each: each.num_given[number])
            worker.open_asks[number] -= 1
            worker.num_given[number] += 1
            held = run.held[run.waiting.popleft()]
            held.worker = worker
            self._outbox.setdefault((worker, run.begin.run), []).append(held.given)
            if not self._flush_due:
                self._flush_due = True
                asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Sends what was given in this turn of the event loop, a message for each worker."""
        outbox, self._outbox, self._flush_due = self._outbox, {}, False
        for (worker, number), tasks in outbox.items():
            give, images = pb.Give(run=number, text=self._wants_text()), ImageNumbers()
            for given in tasks:
                try:
                    give.tasks.append(pack_given(given, images))
                except Exception as problem:  # a row's reader may put anything into it
                    self._fail_alone(worker, number, given, problem)
            images.write_new(give.images)
            worker.send(pb.Command(give=give))

    def _fail_alone(
        self, worker: LoopWorker, number: int, given: GivenTask, problem: Exception
    ) -> None:
        """Ends a task that cannot be sent."""
        run = self._runs.get(number)
        held = None if run is None else run.held.get(given.number)
        if run is None or held is None or held.worker is not worker:  # lost, or ended, meanwhile
            return
        held.worker = None
        worker.num_given[number] -= 1
        worker.open_asks[number] += 1
        error = LoopError(
            f"task {given.task.task_id!r} cannot be given to a loop worker: "
            f"{type(problem).__name__}: {problem}"
        )
        run.ended.put_nowait((given.number, Trajectory.failed(given.task, error)))
        self.give(run)

    def _take(self, worker: LoopWorker, event: pb.Event) -> None:
        kind = event.WhichOneof("message")
        message = event.asks if kind is None else getattr(event, kind)
        run = self._runs.get(message.run)
        if run is None or worker.lost:  # it has ended here; the worker was told
            return
        match message:
            case pb.Asks():
                worker.open_asks[message.run] += message.count
            case pb.Ended():
                for span in read_spans(message.spans):
                    run.sink.record(span)
                held = run.held[message.number]
                task = held.given.task
                trajectory = read_trajectory(message.trajectory, task, run.images[task.task_id])
                held.worker = None
                worker.num_given[message.run] -= 1
                run.ended.put_nowait((message.number, trajectory))
                worker.open_asks[message.run] += message.asks
            case pb.RunFailed():
                run.fail(
                    WorkerRunError(
                        f"loop worker {worker.name} ({worker.place}) failed: "
                        f"{from_wire(message.message)}\n{from_wire(message.traceback).rstrip()}"
                    )
                )
        self.give(run)

    # The processes

    async def _start_first(self, name: str) -> None:
        """Starts a worker, and again if it is lost before it is set up."""
        try:
            await self._start(name, name)
        except LostProcessError as error:
            self._restarts.num_lost += 1
            self._ends[name] = str(error)
            _log.warning("%s", error)
            if not await self._start_again(name):
                raise

    async def _start_again(self, name: str) -> bool:
        """Starts a worker that was lost; returns whether that was possible."""
        while self._restarts.take():
            try:
                await self._start(name, f"{name}-restart-{self._restarts.used}")
            except ProcessError as error:
                self._ends[name] = str(error)
                _log.warning("loop worker did not start again: %s", error)
                continue
            self._restarts.num_restarted += 1
            _log.warning("started again: loop worker %s", name)
            return True
        return False

    async def _start(self, name: str, process_name: str) -> None:
        assert self._settings is not None, "start comes first"
        self._num_started += 1
        worker = await start_worker(
            self._launcher,
            self._settings,
            name=name,
            number=self._num_started,
            process_name=process_name,
            access=self._access,
            on_message=self._take,
            on_end=self._lost,
        )
        self._live[name] = worker
        worker.send(self._weights_command())
        for run in self._runs.values():
            worker.send(pb.Command(begin=run.begin))

    def _lost(self, worker: LoopWorker, problem: str | None) -> None:
        """Gives the tasks of a worker to others, and starts it again."""
        if worker.lost or self._closing or self._live.get(worker.name) is not worker:
            return
        worker.lost = True
        del self._live[worker.name]
        self._restarts.num_lost += 1
        lost = [
            (run, number)
            for run in self._runs.values()
            for number, held in run.held.items()
            if held.worker is worker
        ]
        for run, number in lost:
            run.held[number].worker = None
            run.held[number].num_lost += 1
        for run in self._runs.values():
            self.give(run)  # the others' shares have grown
        replacing = asyncio.create_task(self._replace(worker, problem, lost))
        self._starting[worker.name] = replacing

    async def _replace(
        self, worker: LoopWorker, problem: str | None, lost: Sequence[tuple[_Run, int]]
    ) -> None:
        end = await worker.describe_end(problem)
        _log.warning("%s\n%d trajectories of it are attempted again", end, len(lost))
        self._ends[worker.name] = end
        for run, number in lost:
            self._attempt_again(run, number, end)
        await worker.stop(_KILL_S)
        await self._start_again(worker.name)
        del self._starting[worker.name]
        if not self._live and not self._starting:
            ends = "\n".join(self._ends.values())
            self.fail(NoWorkerLeftError(f"no loop worker is left, {self._restarts}:\n{ends}"))

    def _attempt_again(self, run: _Run, number: int, end: str) -> None:
        """Lets a task of a lost worker wait for another one, or fail."""
        held = run.held.get(number)
        if held is None:  # its run has ended meanwhile
            return
        limit = self._config.agent.max_attempts
        if held.num_lost < limit:
            run.waiting.appendleft(number)
            self.give(run)
            return
        task = held.given.task
        error = WorkerLostError(
            f"task {task.task_id!r}, rollout {task.rollout_index}, lost its loop worker "
            f"{held.num_lost} times (agent.max_attempts={limit}); the last time, {end}"
        )
        run.ended.put_nowait((number, Trajectory.failed(task, error)))

    async def _watch(self) -> None:
        """Looks for workers that give no sign of life."""
        limit_s = self._config.rollout.unresponsive_s
        silence = Silence(limit_s)
        while True:
            await asyncio.sleep(silence.look_s)
            by_number = {worker.number: worker for worker in self._live.values()}
            for number in silence.look((w.number, w.heard) for w in by_number.values()):
                worker = by_number[number]
                at = "" if worker.sign is None else f"; it gave the last one at {worker.sign.place}"
                self._lost(
                    worker,
                    f"stands still: it has given no sign of life for {limit_s:g} s "
                    f"(rollout.unresponsive_s){at}",
                )


@dataclass(slots=True, eq=False)
class _WorkersRunner:
    """A `Runner` on the workers, for one call of `run` at a time."""

    workers: LoopWorkers
    settings: RunnerSettings
    max_in_flight: int
    span_attributes: SpanAttributes | None
    slots: TaskSlots | None = None

    def set_max_in_flight(self, max_in_flight: int) -> None:
        """See `Runner.set_max_in_flight`."""
        if max_in_flight == self.max_in_flight:
            return
        self.max_in_flight = max_in_flight
        if self.slots is not None:
            self.slots.set_limit(max_in_flight)
            self.workers.set_max_in_flight(self)

    async def run(self, tasks: AsyncIterable[AgentTask] | Iterable[AgentTask], sink: Sink) -> None:
        """See `Runner.run`.

        Raises:
            NoWorkerLeftError: No worker is left.
            RouterLostError: The router is gone.
            WorkerRunError: A task names a loop that does not exist, or the worker has a bug.
            Exception: The source or the sink raised it.
        """
        run = self.workers.begin(self)
        slots = self.slots = TaskSlots(self.max_in_flight)

        async def take() -> None:
            number = 0
            async with aclosing(_each(tasks)) as source:
                while True:
                    await slots.acquire()
                    try:
                        task = await anext(source)
                    except StopAsyncIteration:
                        return
                    number += 1
                    attributes = self.span_attributes
                    given = {} if attributes is None else dict(attributes(task))
                    run.hold(number, GivenTask(number, task, given))
                    self.workers.give(run)

        intake = asyncio.create_task(take(), name=f"intake of run {run.begin.run}")
        intake.add_done_callback(lambda _: run.ended.put_nowait(None))
        try:
            while not intake.done() or run.held:
                if (ended := await run.ended.get()) is not None:
                    number, trajectory = ended
                    await sink(trajectory)
                    run.release(number)
                    slots.release()
                if run.failure is not None:
                    raise run.failure
                if intake.done():
                    intake.result()
        finally:
            self.slots = None
            intake.cancel()
            await asyncio.wait({intake})
            self.workers.end(run)


async def _each(
    tasks: AsyncIterable[AgentTask] | Iterable[AgentTask],
) -> AsyncGenerator[AgentTask, None]:
    if isinstance(tasks, AsyncIterable):
        async for task in tasks:
            yield task
    else:
        for task in tasks:
            yield task


class _Addressed(Protocol):
    @property
    def address(self) -> str: ...


@asynccontextmanager
async def loop_workers(
    launcher: Launcher,
    config: Config,
    *,
    servers: Sequence[_Addressed],
    requirements: Requirements,
    loops: frozenset[str],
    images: bool,
    pool: ServerPool | None = None,
) -> AsyncIterator[tuple[LoopWorkers, RunRouter]]:
    """Runs the loop workers of a run, and the router that they share, while the block runs.

    Args:
        loops: Names of the loops that run the rows.
        images: Whether rows may have images.
        pool: Has the servers, and replaces those that end.

    Raises:
        ProcessError: One of the processes did not start, or a worker cannot be set up.
    """
    workers = LoopWorkers(launcher, config, requirements=requirements, loops=loops, images=images)
    async with RunRouter(launcher, config, on_lost=workers.fail) as router, workers:
        await router.start([server.address for server in servers])
        starting = workers.start(router.address)
        if pool is None:
            await starting
        else:
            router.follow(pool)
            workers.follow(pool)
            await pool.replace_while(starting)  # a worker waits for a server that answers
        yield workers, router
