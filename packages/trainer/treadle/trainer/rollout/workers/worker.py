"""The loop worker: a process that runs agent loops, `treadle.trainer.rollout.workers.worker`.

It serves its driver (`loop_worker_service.proto`): it gets once what its runs have in common
(`Setup`), and then runs tasks until `Stop` or the end of the stream. Loops, tools, interactions and
the reward are made here from the configuration, and run here.

Invariants:

1. A run has at most `Begin.max_in_flight` tasks here: requested, waiting or running.
2. A run that fails is reported (`RunFailed`), and disturbs no other.
3. What the driver's user must see of the log, warnings and errors, goes to the driver too.

Who waits: each run for the tasks that it requested; the process for the driver.
"""

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

from treadle.agent_loop import AgentTask, RolloutRunner, SetupError, TokenGenerator, Trajectory
from treadle.agent_loop.rpc import GrpcTokenGenerator, connect
from treadle.agent_loop.rpc.driven import DrivenProgram, serve_driver_in_threads, start_driven
from treadle.agent_loop.rpc.driver_stream import ProgramEnd
from treadle.loop_worker.v1 import loop_worker_service_pb2 as pb
from treadle.loop_worker.v1 import loop_worker_service_pb2_grpc as pb_grpc
from treadle.policy.client.signs_of_life import sign_of_life
from treadle.tracing import (
    FinishedSpan,
    NullSink,
    SpanContext,
    TraceSink,
    use_attributes,
    use_parent,
    use_sink,
)
from treadle.trainer.data.load_data import enter_reward, load_renderer, load_reward
from treadle.trainer.launch.garbage import exempt_present_objects
from treadle.trainer.rollout.loops_from_config import prompt_rules
from treadle.trainer.rollout.make_runner import make_runner
from treadle.trainer.rollout.open_sessions import OpenSessions
from treadle.trainer.rollout.workers.messages import (
    RUNNER_SETTINGS,
    WORKER_SETTINGS,
    GivenTask,
    WorkerSettings,
    pack_spans,
    read_attributes,
    read_given,
)
from treadle.trainer.rollout.workers.plain_values import to_wire
from treadle.trainer.rollout.workers.stored_text import StoredText, stored_text
from treadle.trainer.rollout.workers.trajectory_codec import pack_trajectory

__all__ = ["main"]

_GC_OBJECTS = 50_000
"""New objects between two looks for cycles: some trajectories' worth, a few megabytes."""
_ASK_AGAIN_S = 0.5
_SLICE = 16
"""Tasks that begin before the event loop gets a turn: some 20 ms of work."""
_MAX_UNSENT = 1000
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Spans:
    """Keeps the spans of a run until its next message."""

    spans: list[FinishedSpan] = field(default_factory=list)
    recording: bool = True

    def record(self, span: FinishedSpan) -> None:
        self.spans.append(span)

    def take(self) -> list[FinishedSpan]:
        taken, self.spans = self.spans, []
        return taken


class _Tasks:
    """The tasks of one run: requested, given, running. The source of its runner.

    Args:
        max_in_flight: Maximum number of tasks that are requested, waiting or running.
    """

    def __init__(self, max_in_flight: int) -> None:
        self._limit = max_in_flight
        self.runner: RolloutRunner | None = None
        self._asked = 0
        self._waiting: deque[GivenTask] = deque()
        self._running: dict[int, GivenTask] = {}  # by the identity of its task
        self._given = asyncio.Event()
        self._num_begun = 0

    def give(self, tasks: Sequence[GivenTask]) -> None:
        """Takes tasks that were requested."""
        self._asked -= len(tasks)
        self._waiting.extend(tasks)
        self._given.set()

    def ask(self) -> int:
        """Counts a task as requested for each free slot; returns the number of free slots."""
        held = self._asked + len(self._waiting) + len(self._running)
        count = max(0, self._limit - held)
        self._asked += count
        return count

    def set_limit(self, limit: int) -> None:
        """Changes the number of slots; those that are taken stay taken."""
        self._limit = limit
        if self.runner is not None:
            self.runner.set_max_in_flight(limit)

    def attributes(self, task: AgentTask) -> Mapping[str, object]:
        """Returns the attributes of a running task's spans."""
        return self._running[id(task)].attributes

    def end(self, given: GivenTask) -> None:
        """Frees the place of a running task."""
        del self._running[id(given.task)]

    def running(self, trajectory: Trajectory) -> GivenTask:
        """Returns the running task of a trajectory, whose task may be a copy."""
        given = self._running.get(id(trajectory.task))
        if given is not None:
            return given
        task = trajectory.task
        key = task.task_id, task.rollout_index, task.seed
        return next(
            each
            for each in self._running.values()
            if (each.task.task_id, each.task.rollout_index, each.task.seed) == key
        )

    def __aiter__(self) -> "_Tasks":
        return self

    async def __anext__(self) -> AgentTask:
        """Returns the next task, when the driver has given one.

        Many tasks that were given at once begin in slices: the event loop does all else in between.
        """
        if self._num_begun % _SLICE == 0:
            await asyncio.sleep(0)
        while not self._waiting:
            self._given.clear()
            await self._given.wait()
        self._num_begun += 1
        given = self._waiting.popleft()
        self._running[id(given.task)] = given
        return given.task


class _Worker:
    """The state that all runs of a worker share, and the runs that are open.

    Args:
        beat_s: Seconds between signs of life.
    """

    def __init__(self, *, beat_s: float) -> None:
        self.ended = asyncio.Event()
        self.refused = False
        self.stream = ProgramEnd(
            split=attrgetter("commands"),
            join=lambda events: pb.WorkResponse(events=events),
            on_message=self._take,
            on_end=self.ended.set,
            beat=partial(_beat, threading.get_ident()),
            beat_s=beat_s,
        )
        self._makes_text = True
        self._living: asyncio.Task[None] | None = None
        self._runs: dict[int, tuple[_Tasks, asyncio.Task[None]]] = {}

    async def aclose(self) -> None:
        """Cancels what runs, and closes the loops, the reward and the connections."""
        if self._living is not None:
            await self._living
        self.stream.close()

    def _take(self, command: pb.Command) -> None:
        match command.WhichOneof("message"):
            case "setup":
                settings = WORKER_SETTINGS.validate_json(command.setup.settings)
                self._living = asyncio.create_task(self._live(settings))
            case "begin":
                begin = command.begin
                tasks = _Tasks(begin.max_in_flight)
                running = asyncio.create_task(self._run(begin, tasks), name=f"run {begin.run}")
                self._runs[begin.run] = tasks, running
            case "give":
                self._makes_text = command.give.text
                if (open_run := self._runs.get(command.give.run)) is not None:
                    open_run[0].give(read_given(command.give))
            case "bound":
                run = command.bound.run
                if (open_run := self._runs.get(run)) is not None:
                    open_run[0].set_limit(command.bound.max_in_flight)
                    self._ask(run, open_run[0])
            case "weights":
                self._generator.require_weights(command.weights.version)
            case "end":
                if (open_run := self._runs.pop(command.end.run, None)) is not None:
                    open_run[1].cancel()
            case "stop":
                self.ended.set()

    def _ask(self, run: int, tasks: _Tasks) -> None:
        self.stream.send(pb.Event(asks=pb.Asks(run=run, count=tasks.ask())))

    async def _live(self, settings: WorkerSettings) -> None:
        """Opens everything, waits for the end, and closes it: in one task, as users' code needs."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                await self._until_ended(self._make(settings, stack))
            except SetupError as error:
                self._refuse(str(error))
            except Exception as error:  # the user's code, or a bug: both must be seen
                self._refuse(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
            else:
                self.stream.send(pb.Event(ready=pb.Ready()))
            await self.ended.wait()
            running = [task for _, task in self._runs.values()]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _refuse(self, message: str) -> None:
        self.refused = True
        self.stream.send(pb.Event(refused=pb.Refused(message=to_wire(message))))
        self.ended.set()

    async def _until_ended(self, making: Coroutine[Any, Any, None]) -> None:
        """Makes what is needed, unless the driver ends the worker meanwhile."""
        made = asyncio.current_task()
        assert made is not None
        watch = asyncio.create_task(self.ended.wait())
        watch.add_done_callback(lambda done: None if done.cancelled() else made.cancel())
        try:
            await making
        except asyncio.CancelledError:
            if not self.ended.is_set():
                raise
            made.uncancel()
        finally:
            watch.cancel()

    async def _make(self, settings: WorkerSettings, stack: contextlib.AsyncExitStack) -> None:
        config = settings.config
        self._response_characters = settings.response_characters
        os.chdir(settings.directory)
        self._config = config
        self._rules = prompt_rules(config, images=settings.images)
        self._renderer = await asyncio.to_thread(load_renderer, config)
        # No rows: the driver has compared the reward with them.
        self._reward = load_reward(config, (), rules=None)
        await enter_reward(stack, self._reward)
        await stack.enter_async_context(self._rules.loops.opened(settings.loops))
        self._generator = await stack.enter_async_context(_connected(settings))
        exempt_present_objects()
        gc.set_threshold(_GC_OBJECTS)

    async def _run(self, begin: pb.Begin, tasks: _Tasks) -> None:
        spans = _Spans()
        sink: TraceSink = spans if begin.recording else NullSink()

        async def end(trajectory: Trajectory) -> None:
            given = tasks.running(trajectory)
            packed = pack_trajectory(trajectory, given.task, self._text(trajectory))
            tasks.end(given)
            ended = pb.Ended(
                run=begin.run, number=given.number, trajectory=packed, asks=tasks.ask()
            )
            pack_spans(spans.take(), ended.spans)
            self.stream.send(pb.Event(ended=ended))

        parent = begin.parent
        try:
            with (
                OpenSessions(self._generator) as generator,
                use_sink(sink),
                use_parent(
                    SpanContext(trace_id=parent.trace_id, span_id=parent.span_id)
                    if begin.HasField("parent")
                    else None
                ),
                use_attributes(**read_attributes(begin.attributes)),
            ):
                tasks.runner = self._runner(begin, tasks, generator)
                self._ask(begin.run, tasks)
                await tasks.runner.run(tasks, end)
        except Exception as error:
            failed = pb.RunFailed(
                run=begin.run,
                message=to_wire(f"{type(error).__name__}: {error}"),
                traceback=to_wire(traceback.format_exc()),
            )
            self.stream.send(pb.Event(run_failed=failed))

    def _text(self, trajectory: Trajectory) -> StoredText | None:
        """Returns the text of a trajectory for the trajectory files; None if it is not needed."""
        if not self._makes_text:
            return None
        return stored_text(
            trajectory,
            self._renderer.decode,
            response_characters=self._response_characters,
        )

    def _runner(self, begin: pb.Begin, tasks: _Tasks, generator: TokenGenerator) -> RolloutRunner:
        return make_runner(
            self._config,
            RUNNER_SETTINGS.validate_json(begin.settings),
            generator=generator,
            renderer=self._renderer,
            rules=self._rules,
            reward=self._reward,
            max_in_flight=begin.max_in_flight,
            span_attributes=tasks.attributes,
        )


def _beat(thread: int) -> pb.Event:
    """Returns a sign of life with the place of a thread."""
    sign = sign_of_life(thread)
    return pb.Event(alive=pb.Alive(pid=sign.pid, node=sign.node, place=sign.place))


@contextlib.asynccontextmanager
async def _connected(settings: WorkerSettings) -> AsyncIterator[GrpcTokenGenerator]:
    """Connects to the servers of the router; waits while all of them are being replaced.

    Raises:
        SetupError: None answered within `launch.start_deadline_s`.
    """
    clock = asyncio.get_running_loop().time
    give_up_at = clock() + settings.config.launch.start_deadline_s
    async with contextlib.AsyncExitStack() as stack:
        while True:
            try:
                generator = await stack.enter_async_context(
                    connect(
                        router=settings.router,
                        requirements=settings.requirements,
                        security=settings.security.read(),
                        client="treadle-loop-worker",
                    )
                )
            except SetupError:
                if clock() + _ASK_AGAIN_S > give_up_at:
                    raise
                await asyncio.sleep(_ASK_AGAIN_S)
            else:
                break
        yield generator


class _ToDriver(logging.Handler):
    """Sends warnings and errors to the driver; while it does not read them, counts the rest."""

    def __init__(self, stream: ProgramEnd) -> None:
        super().__init__(level=logging.WARNING)
        self._stream = stream
        self._num_left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        if self._stream.num_unsent >= _MAX_UNSENT:
            self._num_left_out += 1
            return
        text = record.getMessage()
        if self._num_left_out:
            text += f" (and {self._num_left_out} lines before it, which only the worker's log has)"
            self._num_left_out = 0
        warned = pb.Warned(level=record.levelno, message=to_wire(text))
        self._stream.send(pb.Event(warned=warned))


class _Servicer(pb_grpc.LoopWorkerServiceServicer):
    def __init__(self, stream: ProgramEnd) -> None:
        self._stream = stream

    def Work(self, requests: Iterable[pb.WorkRequest], context: object) -> Iterator[object]:
        return self._stream.serve(requests, context)


async def _serve(program: DrivenProgram, *, beat_s: float) -> bool:
    worker = _Worker(beat_s=beat_s)
    handler = _ToDriver(worker.stream)
    logging.getLogger("treadle").addHandler(handler)
    add = partial(pb_grpc.add_LoopWorkerServiceServicer_to_server, _Servicer(worker.stream))
    try:
        with serve_driver_in_threads(program, add):
            await worker.ended.wait()
            await worker.aclose()
    finally:
        logging.getLogger("treadle").removeHandler(handler)
    return not worker.refused


def main(argv: Sequence[str]) -> int:
    """Serves one driver; returns exit status 0 unless the worker could not be set up."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--beat_s", type=float, required=True)
    own, of_program = parser.parse_known_args(argv)
    program = start_driven(of_program, module="treadle.trainer.rollout.workers.worker")
    return 0 if asyncio.run(_serve(program, beat_s=own.beat_s)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
