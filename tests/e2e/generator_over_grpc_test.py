"""The gRPC generator against real rollout servers with the fake engine.

In process: the whole generator contract, and interruptions by weight updates. As processes: a
server that is killed in the middle of a stream.
"""

import asyncio
import math
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from treadle.agent_loop import (
    AgentTask,
    Completion,
    FinishReason,
    LoopLimits,
    Message,
    ReplicaUnavailableError,
    RequestContext,
    SamplingParams,
    Services,
    SetupError,
    Transcript,
)
from treadle.agent_loop.capture import CapturedSession
from treadle.agent_loop.rpc import GrpcTokenGenerator, Requirements, RpcDeadlines, connect
from treadle.agent_loop.testing import ByteRenderer
from treadle.agent_loop.testing.generator_contract import GeneratorContract, GeneratorSubject
from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import InFlightPolicy, ModelInfo
from treadle.rollout_server.engines.fake.engine import FakeEngine, FakeLatency
from treadle.rollout_server.engines.fake.model import routed_experts
from treadle.rollout_server.testing.serving import serve_in_process

pytestmark = pytest.mark.asyncio

MODEL = ModelInfo(architecture="Fake", vocab_size=64, context_length=128)
PROMPT = (5, 9, 13, 2)
PARAMS = SamplingParams(max_tokens=60, temperature=1.0, seed=11, ignore_eos=True)


@dataclass(slots=True)
class HeldClock:
    """The engine's clock: runs ahead of real time, or stands still while it is held.

    Waiting timers are the engine's running sequences, one each.
    """

    now: float = 0.0
    budget: int | None = None
    waiting: list["HeldTimer"] = field(default_factory=list)
    watchers: list[tuple[Callable[[], bool], asyncio.Event]] = field(default_factory=list)

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None], /) -> "HeldTimer":
        timer = HeldTimer(self, when, callback)
        self.waiting.append(timer)
        if self.budget is None or self.budget > 0:
            self.budget = None if self.budget is None else self.budget - 1
            asyncio.get_running_loop().call_soon(timer.fire)
        self.changed()
        return timer

    def hold(self, after: int = 0) -> None:
        """Stands still once `after` more timers have been set."""
        self.budget = after

    def release(self) -> None:
        self.budget = None
        for timer in list(self.waiting):
            timer.fire()

    def changed(self) -> None:
        for condition, event in self.watchers:
            if condition():
                event.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        event = asyncio.Event()
        self.watchers.append((condition, event))
        self.changed()
        await event.wait()

    @property
    def stalled(self) -> int:
        """Sequences that wait for a clock that stands still."""
        return len(self.waiting) if self.budget == 0 else 0


@dataclass(slots=True, eq=False)
class HeldTimer:
    clock: HeldClock
    when: float
    callback: Callable[[], None]

    def fire(self) -> None:
        if self in self.clock.waiting:
            self.cancel()
            self.clock.now = max(self.clock.now, self.when)
            self.callback()

    def cancel(self) -> None:
        if self in self.clock.waiting:
            self.clock.waiting.remove(self)
            self.clock.changed()


def make_engine(clock: HeldClock, model: ModelInfo = MODEL) -> FakeEngine:
    return FakeEngine(model=model, clock=clock, latency=FakeLatency(decode_s_per_token=1.0))


async def ask(
    generator: GrpcTokenGenerator, name: str, *, deadline: float = math.inf
) -> Completion:
    request = RequestContext(request_id=name, session_id=name, deadline=deadline)
    return await generator.generate(PROMPT, PARAMS, request=request)


class TestGrpcGenerator(GeneratorContract):
    """The suite that the scripted fake passes too."""

    @asynccontextmanager
    async def subject(self) -> AsyncIterator[GeneratorSubject]:
        clock = HeldClock()
        engine = make_engine(clock)

        async def until_running(count: int) -> None:
            await clock.until(lambda: clock.stalled >= count)

        async def until_idle() -> None:
            await clock.until(lambda: not clock.waiting)

        async with (
            serve_in_process(engine) as server,
            connect([server.address]) as generator,
        ):
            yield GeneratorSubject(
                generator=generator,
                prompt=PROMPT,
                long_prompt=(1,) * MODEL.context_length,
                vocab_size=MODEL.vocab_size,
                weight_version=0,
                hold=clock.hold,
                release=clock.release,
                until_running=until_running,
                until_idle=until_idle,
            )
        assert engine.counters.running == 0


async def test_a_cancelled_call_is_aborted_in_the_engine() -> None:
    clock = HeldClock()
    engine = make_engine(clock)
    async with serve_in_process(engine) as server, connect([server.address]) as generator:
        clock.hold(after=7)
        calls = [asyncio.create_task(ask(generator, f"r{i}")) for i in range(3)]
        await clock.until(lambda: clock.stalled == 3)
        for call in calls[:2]:
            call.cancel()
        await asyncio.wait(calls[:2])
        await clock.until(lambda: clock.stalled == 1)
        clock.release()
        assert (await calls[2]).num_tokens == 60
    counters = engine.counters
    assert (counters.started, counters.aborted, counters.finished) == (3, 2, 1)


async def test_a_completion_that_an_update_interrupts_is_the_undisturbed_one() -> None:
    """The pause cuts it after some tokens; the client resumes from them, with the same seed."""
    clock = HeldClock()
    engine = make_engine(clock)
    async with serve_in_process(engine) as server, connect([server.address]) as generator:
        undisturbed = await ask(generator, "a")
        clock.hold(after=20)
        call = asyncio.create_task(ask(generator, "b"))
        await clock.until(lambda: clock.stalled == 1)
        await engine.pause(InFlightPolicy.INTERRUPT)
        await engine.resume()
        clock.release()
        resumed = await call
    assert resumed.chunks == undisturbed.chunks
    assert engine.counters.started == 3


async def test_each_row_reports_its_experts_once_through_turns_and_interruptions() -> None:
    model = replace(MODEL, num_moe_layers=2, num_experts=8, experts_per_token=2)
    clock = HeldClock()
    engine = make_engine(clock, model)
    transcript = Transcript(PROMPT)

    async def turn(name: str) -> Completion:
        request = RequestContext(
            request_id=name,
            session_id="s",
            deadline=math.inf,
            routed_experts_from=transcript.num_routed_rows,
        )
        params = replace(PARAMS, max_tokens=20)
        return await generator.generate(transcript.ids, params, request=request)

    needs = Requirements(capabilities=frozenset({"routed_experts"}))
    async with (
        serve_in_process(engine) as server,
        connect([server.address], requirements=needs) as generator,
    ):
        clock.hold(after=7)
        call = asyncio.create_task(turn("interrupted"))
        await clock.until(lambda: clock.stalled == 1)
        await engine.pause(InFlightPolicy.INTERRUPT)
        await engine.resume()
        clock.release()
        completion = await call
        assert completion.num_interruptions == 1
        transcript.sample(completion)
        transcript.observe((7, 7, 8))
        again = await turn("after a tool result")
        assert again.routed_experts is not None
        assert again.routed_experts.first == len(PROMPT) + 20 - 1
        transcript.sample(again)
    frozen = transcript.freeze()
    assert frozen.routed_experts is not None
    assert frozen.routed_experts.data == routed_experts(frozen.ids[:-1], model)
    dense = Requirements(capabilities=needs.capabilities | {"sampled_logprobs"})
    async with serve_in_process(make_engine(clock)) as server:
        with pytest.raises(SetupError, match="'fake' lacks the capability 'routed_experts'"):
            async with connect([server.address], requirements=dense):
                pass


async def test_forks_and_stop_strings_keep_the_experts_of_their_rows() -> None:
    model = replace(
        MODEL,
        vocab_size=ByteRenderer.vocab_size,
        context_length=1024,
        num_moe_layers=2,
        num_experts=300,
        experts_per_token=2,
    )
    first, other = (Message(role="user", content=text) for text in ("first", "another"))
    task = AgentTask(task_id="t", sample_index=0, rollout_index=0, loop="x", messages=(first,))
    async with (
        serve_in_process(make_engine(HeldClock(), model)) as server,
        connect([server.address]) as generator,
    ):
        session = CapturedSession(
            task,
            Services(
                generator=generator,
                renderer=ByteRenderer(),
                limits=LoopLimits(max_response_tokens=500),
                sampling=SamplingParams(max_tokens=20, seed=1),
                routed_experts=True,
            ),
        )
        turn = await session.complete([first])
        said = turn.parsed.message
        cut = await session.complete([first, said, other], stop=[" ", "e", "t", "a", "\ufffd"])
        assert cut.finish is FinishReason.STOP and cut.completion.num_tokens < 20
        await session.complete([first, said, other, cut.parsed.message, first])
        await session.complete([first, replace(said, content="edited"), other])
        await session.complete([first, said, first])  # shares the first turn
    samples = session.samples()
    assert len(samples) == 3
    for sample in samples:
        assert sample.routed_experts is not None
        assert sample.routed_experts.data == routed_experts(sample.ids[:-1], model)


async def test_a_server_that_stops_hands_its_sequences_over_exactly() -> None:
    config = ServerConfig(shutdown_grace_s=0.0)
    clocks = [HeldClock(), HeldClock()]
    engines = [make_engine(clock) for clock in clocks]
    async with AsyncExitStack() as stack:
        first = AsyncExitStack()
        servers = [
            await first.enter_async_context(serve_in_process(engines[0], config=config)),
            await stack.enter_async_context(serve_in_process(engines[1], config=config)),
        ]
        generator = await stack.enter_async_context(connect([s.address for s in servers]))
        undisturbed = await ask(generator, "alone")
        generator.finish_session("alone")
        clocks[0].hold(after=30)
        calls = [asyncio.create_task(ask(generator, f"r{i}")) for i in range(4)]
        await clocks[0].until(lambda: clocks[0].stalled == 2)
        await first.aclose()
        completions = await asyncio.gather(*calls)
    assert {c.token_ids for c in completions} == {undisturbed.token_ids}
    logprobs = {tuple(p for k in c.chunks for p in k.logprobs) for c in completions}
    assert len(logprobs) == 1


async def test_servers_that_do_not_fit_together_are_refused() -> None:
    other = ModelInfo(architecture="Fake", vocab_size=65, context_length=128)
    async with (
        serve_in_process(make_engine(HeldClock())) as first,
        serve_in_process(make_engine(HeldClock(), other)) as second,
    ):
        with pytest.raises(SetupError, match=f"{second.address}: vocab_size is 65, at"):
            async with connect([first.address, second.address]):
                pass
        with pytest.raises(SetupError, match=r"sha256 \(none\), the renderer's has 61"):
            async with connect([first.address], requirements=Requirements(tokenizer_sha256=b"a")):
                pass


class CuttingProxy:
    """Passes bytes on to a server, and calls `cut` once so many came back after `arm`."""

    def __init__(self, target: str, cut: Callable[[], None]) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._cut = cut
        self._left: int | None = None

    def arm(self, num_bytes: int) -> None:
        self._left = num_bytes

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()
            yield f"{host}:{port}"

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pump(reader, upstream[1], counted=False))
            group.create_task(self._pump(upstream[0], writer, counted=True))

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool
    ) -> None:
        try:
            while data := await reader.read(4096):
                writer.write(data)
                await writer.drain()
                if counted and self._left is not None:
                    self._left -= len(data)
                    if self._left <= 0:
                        self._left = None
                        self._cut()
        except OSError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def server_process(*options: str) -> AsyncIterator[tuple[str, "Process"]]:
    """A rollout server of its own process; killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "treadle.rollout_server", "--engine", "fake"),
        *("--coalesce.max_tokens", "1", *options),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        log = b""
        while (ready := re.search(rb"serves at (\S+)", log)) is None:
            line = await process.stderr.readline()
            assert line, f"the server ended before it was ready: {log.decode()}"
            log += line
        yield ready[1].decode(), process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


Process = asyncio.subprocess.Process


async def test_a_server_that_is_killed_in_mid_stream_is_replaced_exactly() -> None:
    """SIGKILL after some tokens have come; the other replica goes on from them."""
    slow = ("--fake.decode_s_per_token", "0.01")
    async with (
        server_process(*slow) as (address_a, process_a),
        server_process() as (address_b, _),
    ):
        async with connect([address_b]) as generator:
            undisturbed = await ask(generator, "alone")
        proxy = CuttingProxy(address_a, process_a.kill)
        async with proxy.serve() as proxied, connect([proxied, address_b]) as generator:
            proxy.arm(1000)
            completions = await asyncio.gather(*(ask(generator, f"r{i}") for i in range(4)))
        assert await process_a.wait() == -9
        assert {c.token_ids for c in completions} == {undisturbed.token_ids}
        assert all(len(c.token_ids) == 60 for c in completions)


async def test_when_every_server_is_dead_the_error_names_them() -> None:
    async with (
        server_process() as (address, process),
        connect([address], deadlines=RpcDeadlines(generate_s=60.0)) as generator,
    ):
        process.kill()
        await process.wait()
        with pytest.raises(ReplicaUnavailableError, match=f"no replica is left.*{address}"):
            await ask(generator, "r")
