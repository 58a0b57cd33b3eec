"""The loop worker: a process that runs agent loops, `treadle.trainer.rollout.workers.worker`.

It listens on its host, writes the address to its ready file, accepts one authenticated connection,
is told once what its runs have in common (`Setup`), and then runs tasks until `Stop` or the end of
the connection. Loops, tools, interactions and the reward are made here from the configuration, and
run here.

Invariants:

1. A run has at most `Begin.max_in_flight` tasks here: asked for, waiting or running.
2. A run that fails says so (`RunFailed`), and disturbs no other.
3. What the driver's user must see of the log, warnings and errors, goes to the driver too.

Who waits: each run for the tasks that it asked for; the process for the driver.
"""

import asyncio
import contextlib
import gc
import logging
import os
import sys
import traceback
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from treadle.agent_loop import AgentTask, RolloutRunner, SetupError, TokenGenerator, Trajectory
from treadle.agent_loop.rpc import GrpcTokenGenerator, connect
from treadle.policy.rank.driver_connection import serve_driver
from treadle.tracing import (
    FinishedSpan,
    NullSink,
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
from treadle.trainer.rollout.workers.link import Link
from treadle.trainer.rollout.workers.messages import (
    Asks,
    Begin,
    Bound,
    End,
    Ended,
    FromDriver,
    Give,
    GivenTask,
    Ready,
    Refused,
    RunFailed,
    Setup,
    Stop,
    Warned,
    Weights,
    pack_spans,
)
from treadle.trainer.rollout.workers.stored_text import StoredText, stored_text
from treadle.trainer.rollout.workers.trajectory_frames import pack_trajectory

__all__ = ["main"]

_FLUSH_S = 5.0
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
    """The tasks of one run: asked for, given, running. The source of its runner.

    Args:
        begin: Of the run.
    """

    def __init__(self, begin: Begin) -> None:
        self._limit = begin.max_in_flight
        self.runner: RolloutRunner | None = None
        self._asked = 0
        self._waiting: deque[GivenTask] = deque()
        self._running: dict[int, GivenTask] = {}  # by the identity of its task
        self._given = asyncio.Event()
        self._num_begun = 0

    def give(self, tasks: Sequence[GivenTask]) -> None:
        """Takes tasks that were asked for."""
        self._asked -= len(tasks)
        self._waiting.extend(tasks)
        self._given.set()

    def ask(self) -> int:
        """Counts all free slots as asked for; returns how many they are."""
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
    """The state that all runs of a worker share, and the runs that are open."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.refused = False
        self._makes_text = True
        self._link: Link | None = None
        self._living: asyncio.Task[None] | None = None
        self._runs: dict[int, tuple[_Tasks, asyncio.Task[None]]] = {}

    def serve(self, connection: "Connection[Any, Any]", *, beat_s: float) -> Link:
        """Begins to take messages from the driver."""
        self._link = Link(
            connection,
            on_message=self._take,
            on_end=lambda _: self.ended.set(),
            beat_s=beat_s,
        )
        return self._link

    async def aclose(self) -> None:
        """Cancels what runs, and closes the loops, the reward and the connections."""
        if self._living is not None:
            await self._living

    def _take(self, message: FromDriver) -> None:
        assert self._link is not None
        match message:
            case Setup():
                self._living = asyncio.create_task(self._live(message, self._link))
            case Begin():
                tasks = _Tasks(message)
                running = asyncio.create_task(
                    self._run(message, tasks, self._link), name=f"run {message.run}"
                )
                self._runs[message.run] = tasks, running
            case Give():
                self._makes_text = message.text
                if (open_run := self._runs.get(message.run)) is not None:
                    open_run[0].give(message.tasks)
            case Bound():
                if (open_run := self._runs.get(message.run)) is not None:
                    open_run[0].set_limit(message.max_in_flight)
                    self._link.send(Asks(message.run, open_run[0].ask()))
            case Weights():
                self._generator.require_weights(message.version)
            case End():
                if (open_run := self._runs.pop(message.run, None)) is not None:
                    open_run[1].cancel()
            case Stop():
                self.ended.set()

    async def _live(self, setup: Setup, link: Link) -> None:
        """Opens everything, waits for the end, and closes it: in one task, as users' code needs."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                await self._until_ended(self._make(setup, stack))
            except SetupError as error:
                self._refuse(link, str(error))
            except Exception as error:  # the user's code, or a bug: both must be seen
                self._refuse(link, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
            else:
                link.send(Ready())
            await self.ended.wait()
            running = [task for _, task in self._runs.values()]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _refuse(self, link: Link, message: str) -> None:
        self.refused = True
        link.send(Refused(message))
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

    async def _make(self, setup: Setup, stack: contextlib.AsyncExitStack) -> None:
        config = setup.config
        self._response_characters = setup.response_characters
        os.chdir(setup.directory)
        self._config = config
        self._rules = prompt_rules(config, images=setup.images)
        self._renderer = await asyncio.to_thread(load_renderer, config)
        # No rows: the driver has compared the reward with them.
        self._reward = load_reward(config, (), rules=None)
        await enter_reward(stack, self._reward)
        await stack.enter_async_context(self._rules.loops.opened(setup.loops))
        self._generator = await stack.enter_async_context(_connected(setup))
        exempt_present_objects()
        gc.set_threshold(_GC_OBJECTS)

    async def _run(self, begin: Begin, tasks: _Tasks, link: Link) -> None:
        spans = _Spans()
        sink: TraceSink = spans if begin.recording else NullSink()

        async def end(trajectory: Trajectory) -> None:
            given = tasks.running(trajectory)
            packed = pack_trajectory(trajectory, given.task, self._text(trajectory))
            tasks.end(given)
            taken = pack_spans(spans.take())
            link.send(Ended(begin.run, given.number, packed, taken, tasks.ask()))

        try:
            with (
                OpenSessions(self._generator) as generator,
                use_sink(sink),
                use_parent(begin.parent),
                use_attributes(**begin.attributes),
            ):
                tasks.runner = self._runner(begin, tasks, generator)
                link.send(Asks(begin.run, tasks.ask()))
                await tasks.runner.run(tasks, end)
        except Exception as error:
            link.send(
                RunFailed(begin.run, f"{type(error).__name__}: {error}", traceback.format_exc())
            )

    def _text(self, trajectory: Trajectory) -> StoredText | None:
        """Returns what the trajectory files say of a trajectory, while they get all."""
        if not self._makes_text:
            return None
        return stored_text(
            trajectory,
            self._renderer.decode,
            response_characters=self._response_characters,
        )

    def _runner(self, begin: Begin, tasks: _Tasks, generator: TokenGenerator) -> RolloutRunner:
        return make_runner(
            self._config,
            begin.settings,
            generator=generator,
            renderer=self._renderer,
            rules=self._rules,
            reward=self._reward,
            max_in_flight=begin.max_in_flight,
            span_attributes=tasks.attributes,
        )


@contextlib.asynccontextmanager
async def _connected(setup: Setup) -> AsyncIterator[GrpcTokenGenerator]:
    """Connects to the servers of the router; waits while all of them are being replaced.

    Raises:
        SetupError: None answered within `launch.start_deadline_s`.
    """
    clock = asyncio.get_running_loop().time
    give_up_at = clock() + setup.config.launch.start_deadline_s
    async with contextlib.AsyncExitStack() as stack:
        while True:
            try:
                generator = await stack.enter_async_context(
                    connect(
                        router=setup.router,
                        requirements=setup.requirements,
                        security=setup.security.read(),
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

    def __init__(self, link: Link) -> None:
        super().__init__(level=logging.WARNING)
        self._link = link
        self._num_left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        if self._link.num_unsent >= _MAX_UNSENT:
            self._num_left_out += 1
            return
        text = record.getMessage()
        if self._num_left_out:
            text += f" (and {self._num_left_out} lines before it, which only the worker's log has)"
            self._num_left_out = 0
        self._link.send(Warned(record.levelno, text))


async def _serve(connection: "Connection[Any, Any]", *, beat_s: float) -> bool:
    worker = _Worker()
    link = worker.serve(connection, beat_s=beat_s)
    handler = _ToDriver(link)
    logging.getLogger("treadle").addHandler(handler)
    try:
        await worker.ended.wait()
        await worker.aclose()
    finally:
        logging.getLogger("treadle").removeHandler(handler)
        await asyncio.to_thread(link.close, flushed_s=_FLUSH_S)
    return not worker.refused


def main(argv: Sequence[str]) -> int:
    """Serves one driver; returns exit status 0 unless the worker could not be set up."""

    def serve(connection: "Connection[Any, Any]", _: str, beat_s: float) -> bool:
        return asyncio.run(_serve(connection, beat_s=beat_s))

    return serve_driver(argv, module="treadle.trainer.rollout.workers.worker", serve=serve)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
