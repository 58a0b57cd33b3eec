"""Tests of the loop workers' bookkeeping; a test scripts the workers, over real streams."""

import asyncio
import contextlib
import os
import platform
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import pytest_asyncio

from treadle.agent_loop import (
    AgentTask,
    Image,
    LoopError,
    Message,
    SamplingParams,
    StopReason,
    Trajectory,
)
from treadle.agent_loop.rpc import Requirements
from treadle.agent_loop.rpc.driven import (
    TOKEN_VARIABLE,
    DrivenProgram,
    serve_driver_in_threads,
)
from treadle.agent_loop.rpc.driver_stream import ProgramEnd
from treadle.loop_worker.v1 import loop_worker_service_pb2 as pb
from treadle.loop_worker.v1 import loop_worker_service_pb2_grpc as pb_grpc
from treadle.loop_worker.v1 import trajectory_pb2
from treadle.tracing import FinishedSpan, MemorySink, use_attributes, use_sink
from treadle.trainer.config.load import load_config
from treadle.trainer.launch.local import describe_exit
from treadle.trainer.launch.process import LostProcessError, ProcessError, ProcessSpec
from treadle.trainer.rollout.make_runner import RunnerSettings
from treadle.trainer.rollout.rotation import Routes
from treadle.trainer.rollout.workers import worker_process
from treadle.trainer.rollout.workers.messages import (
    RUNNER_SETTINGS,
    GivenTask,
    pack_spans,
    read_attributes,
    read_given,
)
from treadle.trainer.rollout.workers.pool import LoopWorkers, NoWorkerLeftError, WorkerRunError
from treadle.trainer.rollout.workers.trajectory_codec import WorkerLostError, pack_trajectory

pytestmark = pytest.mark.asyncio

SETTINGS = RunnerSettings(sampling=SamplingParams(max_tokens=1), min_weight_version=3)


def task(index: int) -> AgentTask:
    return AgentTask(
        task_id="train/0",
        sample_index=0,
        rollout_index=index,
        loop="loop",
        messages=(Message(role="user", content="hi"),),
        seed=index,
    )


def finished(of: AgentTask) -> Trajectory:
    seen = Message(role="tool", content="", images=(Image(data=b"png", mime="image/png"),))
    answer = Message(role="assistant", content=str(of.seed))
    return Trajectory(
        task=of, samples=(), messages=(*of.messages, seen, answer), stop=StopReason.FINISHED
    )


@dataclass
class Program:
    """A worker's process as the driver sees it, and the worker as the test scripts it."""

    name: str
    refusal: str | None
    directory: Path
    falls: str = ""
    got: "asyncio.Queue[Any]" = field(default_factory=asyncio.Queue)
    given: dict[tuple[int, int], GivenTask] = field(default_factory=dict)
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    ends_all: bool = False
    node: str = "n"
    serving: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    async def ready(self, deadline_s: float) -> str:
        if self.falls == "before it is connected":
            self.die()
        return self.address

    async def wait(self) -> int:
        await self.dead.wait()
        return -signal.SIGKILL

    def describe_end(self, status: int) -> str:
        return describe_exit(status)

    async def log_tail(self, lines: int = 20) -> str:
        return f"the last line of {self.name}"

    async def stop(self, grace_s: float = 10.0) -> None:
        self.die()

    def listen(self, token: str) -> None:
        self.stream = ProgramEnd(
            split=attrgetter("commands"),
            join=lambda events: pb.WorkResponse(events=events),
            on_message=self._take,
            on_end=lambda: self.got.put_nowait((None, None)),
            beat=lambda: pb.Event(
                alive=pb.Alive(pid=os.getpid(), node=platform.node(), place="here:1, in f")
            ),
            beat_s=1000.0,
        )
        program = DrivenProgram(
            host="127.0.0.1", token=token, ready_file=self.directory / f"{self.name}.ready"
        )
        add = partial(pb_grpc.add_LoopWorkerServiceServicer_to_server, self)
        self.address = self.serving.enter_context(serve_driver_in_threads(program, add))
        # Else a test would wait for a worker that nobody ends.
        self.serving.callback(self.stream.close)

    def Work(self, requests: Any, context: object) -> Iterator[object]:
        return self.stream.serve(requests, context)

    def _take(self, command: pb.Command) -> None:
        kind = command.WhichOneof("message")
        if kind == "setup" and self.falls == "before it is set up":
            self.die()
        elif kind == "setup" and self.falls == "when it is ready":
            self.say(ready=pb.Ready())
            self.die()
        elif kind == "setup":
            if self.refusal is None:
                self.say(ready=pb.Ready())
            else:
                self.say(refused=pb.Refused(message=self.refusal.encode()))
        elif kind == "give":
            for given in read_given(command.give):
                self.given[command.give.run, given.number] = given
            if self.ends_all:
                self.end_all()
        elif kind == "stop":
            self.die()
        if kind != "setup":
            assert kind is not None
            self.got.put_nowait((kind, getattr(command, kind)))

    def say(self, **message: Any) -> None:
        self.stream.send(pb.Event(**message))

    def die(self) -> None:
        self.dead.set()
        self.serving.close()

    async def next(self, kind: str) -> Any:
        while (got := await self.got.get())[0] != kind:
            pass
        return got[1]

    async def given_of(self, run: int) -> list[int]:
        """Returns the numbers of the tasks of a run that come next."""
        while (give := await self.next("give")).run != run:
            pass
        return [given.number for given in give.tasks]

    async def asks(self, count: int) -> pb.Begin:
        begin: pb.Begin = await self.next("begin")
        self.say(asks=pb.Asks(run=begin.run, count=count))
        return begin

    def end_all(self) -> None:
        """Ends what it has, and from now on what it is given."""
        self.ends_all = True
        for run, number in list(self.given):
            self.end(run, number)

    def end(self, run: int, number: int, *, spans: Sequence[FinishedSpan] = ()) -> None:
        given = self.given.pop((run, number))
        packed = pack_trajectory(finished(given.task), given.task)
        ended = pb.Ended(run=run, number=number, trajectory=packed, asks=1)
        pack_spans(spans, ended.spans)
        self.say(ended=ended)


@dataclass
class Machine:
    """A launcher of scripted workers."""

    directory: Path
    refusals: list[str | None] = field(default_factory=list)
    falls: str = ""
    """When the first one ends by itself."""
    programs: list[Program] = field(default_factory=list)
    started: "asyncio.Queue[Program]" = field(default_factory=asyncio.Queue)
    tls: None = None

    async def start(self, spec: ProcessSpec) -> Program:
        refusal = self.refusals.pop(0) if self.refusals else None
        program = Program(spec.name, refusal, self.directory, self.falls)
        self.falls = ""
        program.listen(spec.env[TOKEN_VARIABLE])
        self.programs.append(program)
        self.started.put_nowait(program)
        return program

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass


@dataclass
class WorkerHarness:
    machine: Machine
    workers: LoopWorkers
    ended: list[Trajectory] = field(default_factory=list)
    taken: "asyncio.Queue[Trajectory]" = field(default_factory=asyncio.Queue)

    async def sink(self, trajectory: Trajectory) -> None:
        self.ended.append(trajectory)
        self.taken.put_nowait(trajectory)

    def run(self, count: int, *, max_in_flight: int = 8) -> "asyncio.Task[None]":
        runner = self.workers.runner(SETTINGS, max_in_flight=max_in_flight)
        return asyncio.create_task(runner.run([task(i) for i in range(count)], self.sink))


Start = Callable[..., Awaitable[WorkerHarness]]


@pytest_asyncio.fixture(name="start")
async def _start(tmp_path: Path) -> Any:
    opened: list[LoopWorkers] = []

    async def start(
        count: int = 2, *settings: str, refusals: Sequence[str | None] = (), falls: str = ""
    ) -> WorkerHarness:
        given = ["model.path=/m", "data.train_files=/t.jsonl", f"agent.num_workers={count}"]
        machine = Machine(tmp_path, list(refusals), falls)
        workers = LoopWorkers(
            machine,
            load_config([], [*given, *settings]).config,
            requirements=Requirements(),
            loops=frozenset(),
            images=False,
        )
        opened.append(workers)
        await workers.__aenter__()
        await workers.start("127.0.0.1:1")
        return WorkerHarness(machine, workers)

    yield start
    for workers in opened:
        await workers.__aexit__()


async def test_workers_are_told_with_their_next_tasks_that_no_text_is_wanted_any_more(
    start: Start,
) -> None:
    harness = await start(1)
    [worker] = harness.machine.programs
    harness.workers.make_text_while(lambda: not harness.ended)
    running = harness.run(2, max_in_flight=1)
    await worker.asks(1)
    for wanted in (True, False):
        assert (await worker.next("give")).text is wanted
        worker.end_all()
    await running
    assert len(harness.ended) == 2


async def test_each_task_ends_once_and_no_worker_has_more_than_it_asked_for(start: Start) -> None:
    harness = await start(2)
    first, second = harness.machine.programs
    running = harness.run(5, max_in_flight=3)
    run = (await first.asks(2)).run
    assert RUNNER_SETTINGS.validate_json((await second.asks(2)).settings) == SETTINGS
    gave = asyncio.gather(first.next("give"), second.next("give"))
    numbers = sorted(given.number for give in await gave for given in give.tasks)
    assert numbers == [1, 2, 3], "of five: no more are in flight"
    assert max(len(first.given), len(second.given)) == 2
    for program in (first, second):
        program.end_all()
    await running
    assert sorted(t.task.rollout_index for t in harness.ended) == list(range(5))
    assert [t.messages[-1].content for t in harness.ended] == [
        str(t.task.seed) for t in harness.ended
    ]
    assert (await first.next("end")).run == run
    assert harness.workers.take_metrics() == {
        "workers/live": 2.0,
        "workers/lost": 0.0,
        "workers/restarted": 0.0,
    }


async def test_a_row_shares_images_while_one_of_its_tasks_is_in_flight(start: Start) -> None:
    harness = await start(1)
    program = harness.machine.programs[0]
    for max_in_flight, num_images in ((2, 1), (1, 2)):
        harness.ended.clear()
        running = harness.run(2, max_in_flight=max_in_flight)
        run = (await program.asks(2)).run
        while len(program.given) < max_in_flight:
            await program.given_of(run)
        program.end_all()
        await running
        program.ends_all = False
        images = [message.images for t in harness.ended for message in t.messages[1:2]]
        assert len({id(image) for (image,) in images}) == num_images


async def test_the_first_worker_to_ask_gets_no_more_than_its_share(start: Start) -> None:
    async def numbers(program: Program, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            found += await program.given_of(run)
        return found

    harness = await start(3)
    first, second, third = harness.machine.programs
    running = harness.run(6, max_in_flight=6)
    run = (await first.asks(6)).run
    assert await numbers(first, 2) == [1, 2]
    await second.asks(6)
    assert await numbers(second, 2) == [3, 4]
    third.die()  # before it asked: the others' shares grow
    assert sorted([*await numbers(first, 1), *await numbers(second, 1)]) == [5, 6]
    first.end_all()
    second.end_all()
    await running


async def test_the_bound_of_a_run_under_way_may_change(start: Start) -> None:
    harness = await start(1)
    program = harness.machine.programs[0]
    runner = harness.workers.runner(SETTINGS, max_in_flight=1)
    running = asyncio.create_task(runner.run([task(i) for i in range(3)], harness.sink))
    run = (await program.asks(3)).run
    assert await program.given_of(run) == [1]
    runner.set_max_in_flight(3)
    assert (await program.next("bound")).max_in_flight == 3
    assert await program.given_of(run) == [2, 3]
    program.end_all()
    await running


async def test_each_worker_is_told_which_weights_it_needs_also_one_that_is_started_again(
    start: Start,
) -> None:
    harness, listeners = await start(1), list[Callable[[Routes], None]]()
    program = harness.machine.programs[0]
    assert await program.next("weights") == pb.Weights()
    harness.workers.follow(SimpleNamespace(on_change=listeners.append))  # type: ignore[arg-type]
    (listener,) = listeners
    listener(Routes(serving=("a:1",), weight_version=4))
    assert await program.next("weights") == pb.Weights(version=4)
    await harness.machine.started.get()
    program.die()
    replacement = await harness.machine.started.get()
    assert await replacement.next("weights") == pb.Weights(version=4)


async def test_a_worker_that_dies_costs_its_trajectories_one_more_attempt(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    harness = await start(1)
    dying = harness.machine.programs[0]
    running = harness.run(2)
    run = (await dying.asks(8)).run
    await dying.next("give")
    dying.end(run, 1)
    await harness.taken.get()
    dying.die()
    await harness.machine.started.get()
    replacement = await harness.machine.started.get()
    assert replacement.name == "worker-0-restart-1"
    assert (await replacement.asks(8)).run == run
    (number,) = await replacement.given_of(run)
    assert replacement.given[run, number].task == task(1)
    replacement.end(run, number)
    await running
    assert [t.task.rollout_index for t in harness.ended] == [0, 1]
    assert (
        f"loop worker worker-0 (pid {os.getpid()} on {platform.node()}) was ended by SIGKILL"
        in (caplog.text)
    )
    assert "its log ends with:\nthe last line of worker-0\n1 trajectories" in caplog.text
    metrics = harness.workers.take_metrics()
    assert metrics == {"workers/live": 1.0, "workers/lost": 1.0, "workers/restarted": 1.0}


async def test_a_task_that_ends_its_workers_fails_and_the_others_do_not(start: Start) -> None:
    harness = await start(1, "agent.max_attempts=2")
    running = harness.run(1)
    for _ in range(2):
        program = await harness.machine.started.get()
        await program.asks(1)
        await program.next("give")
        program.die()
    await running
    error = harness.ended[0].error
    assert isinstance(error, WorkerLostError)
    assert "task 'train/0', rollout 0, lost its loop worker 2 times" in str(error)
    assert "was ended by SIGKILL; its log ends with:\nthe last line of worker-0-restart-1" in (
        str(error)
    )


async def test_without_a_worker_the_run_ends_and_says_how_each_ended(start: Start) -> None:
    harness = await start(1, "agent.max_worker_restarts=1", refusals=[None, "no such loop"])
    running = harness.run(1)
    await harness.machine.programs[0].asks(1)
    harness.machine.programs[0].die()
    with pytest.raises(
        NoWorkerLeftError, match=r"after 1 restarts .*:\nloop worker .*no such loop"
    ):
        await running
    with pytest.raises(NoWorkerLeftError):
        await harness.run(1)


async def test_a_worker_that_cannot_be_set_up_fails_the_start(start: Start) -> None:
    with pytest.raises(ProcessError, match="loop worker worker-0: no such loop"):
        await start(1, refusals=["no such loop"])


@pytest.mark.parametrize("falls", ["before it is connected", "before it is set up"])
async def test_a_worker_that_ends_before_it_is_ready_is_started_again(
    start: Start, falls: str, caplog: pytest.LogCaptureFixture
) -> None:
    harness = await start(1, falls=falls)
    names = [program.name for program in harness.machine.programs]
    assert names == ["worker-0", "worker-0-restart-1"]
    assert harness.workers.take_metrics() == {
        "workers/live": 1.0,
        "workers/lost": 1.0,
        "workers/restarted": 1.0,
    }
    assert "was ended by SIGKILL; its log ends with:\nthe last line of worker-0\n" in caplog.text
    with pytest.raises(LostProcessError, match="was ended by SIGKILL"):
        await start(1, "agent.max_worker_restarts=0", falls=falls)


async def test_a_worker_that_ends_and_whose_connection_does_not_is_lost(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_process, "_LAST_WORDS_S", 0.01)
    harness = await start(1)
    running = harness.run(1)
    first = await harness.machine.started.get()
    await first.asks(1)
    await first.next("give")
    first.dead.set()  # a reward's pool of processes still has the connection
    replacement = await harness.machine.started.get()
    await replacement.asks(1)
    replacement.end_all()
    await running
    assert "was ended by SIGKILL; its log ends with:\nthe last line of worker-0\n" in caplog.text


async def test_a_worker_that_ends_as_soon_as_it_is_ready_is_replaced(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    harness = await start(1, falls="when it is ready")
    running = harness.run(1)
    await harness.machine.started.get()
    replacement = await harness.machine.started.get()
    await replacement.asks(1)
    replacement.end_all()
    await running
    assert "was ended by SIGKILL; its log ends with:\nthe last line of worker-0\n" in caplog.text


async def test_a_silent_worker_is_lost(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    harness = await start(1, "rollout.unresponsive_s=0.2")
    running = harness.run(1)
    await harness.machine.started.get()
    replacement = await harness.machine.started.get()  # the first said nothing after its start
    assert harness.workers._watching is not None
    harness.workers._watching.cancel()  # nor does this one, and the test may be slow
    run = (await replacement.asks(1)).run
    await replacement.next("give")
    replacement.end(run, 1)
    await running
    assert "has given no sign of life for 0.2 s (rollout.unresponsive_s)" in caplog.text


async def test_a_run_that_a_worker_cannot_carry_out_fails_alone(start: Start) -> None:
    harness = await start(1)
    program = harness.machine.programs[0]
    failing, other = harness.run(1), harness.run(1)
    first, second = (await program.asks(1)).run, (await program.asks(1)).run
    failed = pb.RunFailed(run=first, message=b"UnknownLoopError: no loop", traceback=b"Trace: here")
    program.say(run_failed=failed)
    with pytest.raises(
        WorkerRunError, match=r"worker-0 .* failed: UnknownLoopError: no loop\nTrac"
    ):
        await failing
    await program.given_of(second)
    program.end(second, 1)
    await other


async def test_a_cancelled_run_leaves_no_task_with_a_worker(start: Start) -> None:
    harness = await start(1)
    program = harness.machine.programs[0]
    running = harness.run(1)
    run = (await program.asks(1)).run
    await program.next("give")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await program.next("end")).run == run
    program.end(run, 1)  # it was on its way
    following = harness.run(1)
    run = (await program.asks(1)).run
    await program.given_of(run)
    program.end(run, 1)
    await following
    assert len(harness.ended) == 1


async def test_spans_reach_the_sink_of_their_run(start: Start) -> None:
    harness, sink = await start(1), MemorySink()
    program = harness.machine.programs[0]
    with use_sink(sink), use_attributes(step=7):
        running = harness.run(1)
    begin = await program.asks(1)
    assert (begin.recording, read_attributes(begin.attributes)) == (True, {"step": 7})
    await program.next("give")
    made = FinishedSpan(
        name="turn",
        trace_id="a" * 32,
        span_id="b" * 16,
        parent_id=None,
        start_unix_ns=1,
        duration_ns=2,
        attributes={"step": 7, "output": {"text": "x"}},
        error=None,
    )
    program.end(begin.run, 1, spans=[made])
    await running
    assert sink.spans == (made,)


async def test_a_task_that_cannot_be_sent_fails_alone(start: Start) -> None:
    harness = await start(1)
    program = harness.machine.programs[0]
    odd = replace(task(0), fields={"extra": {"place": object()}})
    runner = harness.workers.runner(SETTINGS, max_in_flight=2)
    running = asyncio.create_task(runner.run([odd, task(1)], harness.sink))
    await program.asks(1)
    program.end_all()
    await running
    failed, ended = harness.ended
    assert isinstance(failed.error, LoopError)
    assert "fields['extra']['place'] is of type builtins.object; return plain data" in (
        str(failed.error)
    )
    assert (ended.error, ended.task) == (None, task(1))


async def test_a_worker_that_sends_what_cannot_be_read_is_lost(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "_EXIT_S", 0.01)
    harness = await start(1)
    running = harness.run(1)
    first = await harness.machine.started.get()
    run = (await first.asks(1)).run
    (number,) = await first.given_of(run)
    odd = trajectory_pb2.Trajectory(conversation=b"no zlib", exchange=b"{")
    first.say(ended=pb.Ended(run=run, number=number, trajectory=odd))
    replacement = await harness.machine.started.get()
    replacement.end_all()
    await replacement.asks(1)
    await running
    assert [t.error for t in harness.ended] == [None]
    assert "sent what cannot be read here: JSONDecodeError" in caplog.text
