import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress

import pytest

from treadle.rollout_server.engine import (
    CollectiveGroup,
    ElementType,
    EngineCapabilities,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    Finished,
    FinishReason,
    InFlightPolicy,
    MemoryKind,
    ModelInfo,
    NamedTensor,
    Sampling,
    Started,
    TensorSpec,
    Tokens,
)
from treadle.rollout_server.engines.sglang import engine as engine_module
from treadle.rollout_server.engines.sglang.engine import SglangEngine
from treadle.rollout_server.engines.sglang.testing import Schedulers
from treadle.rollout_server.errors import CollectiveBroken, EngineFailed, TensorMismatch

SPEC = TensorSpec(name="w", element_type=ElementType.FLOAT32, shape=(1,))


def engine_over(
    schedulers: Schedulers, *, max_running: int = 4, host: bool = False
) -> SglangEngine:
    info = EngineInfo(
        name="sglang",
        version="0",
        capabilities=EngineCapabilities(),
        model=ModelInfo(architecture="A", vocab_size=100, context_length=64),
        parameters=(SPEC,),
    )
    return SglangEngine(info, schedulers, max_running=max_running, host_cache=host)


def request(*, max_tokens: int = 100, priority: int = 0) -> EngineRequest:
    sampling = Sampling(max_tokens=max_tokens)
    return EngineRequest(request_id="r", prompt=(1,), sampling=sampling, priority=priority)


async def read(engine: SglangEngine, wanted: EngineRequest) -> list[EngineEvent]:
    async with aclosing(engine.generate(wanted)) as events:
        return [event async for event in events]


async def settle() -> None:
    """Lets every task go on until it waits for something that only the test can do."""
    for _ in range(10):
        await asyncio.sleep(0)


async def tensors(*specs: TensorSpec) -> AsyncIterator[NamedTensor]:
    for spec in specs:
        yield NamedTensor(spec=spec, data=memoryview(bytearray(spec.size_bytes)))


@pytest.mark.asyncio
async def test_a_sequence_is_started_tokens_and_an_end() -> None:
    schedulers = Schedulers()
    engine = engine_over(schedulers)
    reading = asyncio.create_task(read(engine, request(max_tokens=2)))
    await settle()
    schedulers.step()
    await settle()
    schedulers.step()
    schedulers.end_all({"type": "length"})
    assert await reading == [
        Started(1),
        Tokens((0,), (), 0),
        Tokens((1,), (), 0),
        Finished(FinishReason.LENGTH),
    ]
    assert (engine.counters.started, engine.counters.finished) == (1, 1)


@pytest.mark.asyncio
async def test_closing_ends_what_runs_and_what_waits() -> None:
    schedulers = Schedulers()
    engine = engine_over(schedulers, max_running=1)
    running = asyncio.create_task(read(engine, request()))
    await settle()
    schedulers.step()
    waiting = asyncio.create_task(read(engine, request()))
    await settle()
    await engine.aclose()
    await engine.aclose()
    interrupted = Finished(FinishReason.INTERRUPTED)
    assert await running == [Started(1), Tokens((0,), (), 0), interrupted]
    assert await waiting == [Started(0), interrupted]
    assert await read(engine, request()) == [Started(0), interrupted]
    assert schedulers.log == ["aclose"]
    counters = engine.counters
    assert (counters.started, counters.finished, counters.running) == (3, 3, 0)


@pytest.mark.asyncio
async def test_interrupt_delivers_what_was_sampled_before() -> None:
    schedulers = Schedulers()
    engine = engine_over(schedulers)
    reading = asyncio.create_task(read(engine, request()))
    await settle()
    schedulers.step()
    schedulers.step()
    await engine.pause(InFlightPolicy.INTERRUPT)
    assert schedulers.log == ["pause_generation", "abort_all"]
    assert (await reading)[-2:] == [Tokens((0, 1), (), 0), Finished(FinishReason.INTERRUPTED)]


@pytest.mark.asyncio
async def test_a_slow_reader_learns_which_weights_sampled_what() -> None:
    schedulers = Schedulers()
    engine = engine_over(schedulers)
    events = engine.generate(request(max_tokens=5))
    first = asyncio.create_task(anext(events))
    await settle()
    schedulers.step()
    assert await first == Started(1)
    schedulers.step()
    for version in (3, 4):
        await engine.pause(InFlightPolicy.CONTINUE)
        await engine.load_weights(tensors(SPEC), version=version)
        await engine.resume()
        schedulers.step()
    schedulers.step()
    schedulers.end_all({"type": "length"})
    rest = [event async for event in events]
    assert rest == [
        Tokens((0,), (), 0),
        Tokens((1,), (), 0),
        Tokens((2,), (), 3),
        Tokens((3, 4), (), 4),
        Finished(FinishReason.LENGTH),
    ]


@pytest.mark.asyncio
async def test_a_sequence_that_ended_before_an_update_is_all_old() -> None:
    schedulers = Schedulers()
    engine = engine_over(schedulers)
    events = engine.generate(request(max_tokens=2))
    first = asyncio.create_task(anext(events))
    await settle()
    schedulers.step()
    schedulers.step()
    await first
    schedulers.end_all({"type": "length"})
    await engine.pause(InFlightPolicy.CONTINUE)
    await engine.load_weights(tensors(SPEC), version=9)
    assert await anext(events) == Tokens((0, 1), (), 0)
    assert engine.weight_version == 9


@pytest.mark.asyncio
async def test_nothing_starts_while_paused_and_the_highest_priority_first_afterwards() -> None:
    schedulers = Schedulers()
    engine = engine_over(schedulers, max_running=1)
    await engine.pause(InFlightPolicy.DRAIN)
    low = asyncio.create_task(read(engine, request()))
    high = asyncio.create_task(read(engine, request(priority=1)))
    await settle()
    assert not schedulers.streams
    await engine.resume()
    await settle()
    schedulers.abort_locally()
    await asyncio.wait({low, high}, return_when=asyncio.FIRST_COMPLETED)
    assert high.done() and not low.done()
    low.cancel()
    with suppress(asyncio.CancelledError, RuntimeError):
        await asyncio.gather(low, high)


@pytest.mark.asyncio
async def test_drain_lets_go_on_what_continue_kept() -> None:
    schedulers = Schedulers()
    engine = engine_over(schedulers)
    reading = asyncio.create_task(read(engine, request(max_tokens=1)))
    await settle()
    await engine.pause(InFlightPolicy.CONTINUE)
    draining = asyncio.create_task(engine.pause(InFlightPolicy.DRAIN))
    await settle()
    assert schedulers.log == ["pause_generation", "continue_generation"] and not draining.done()
    schedulers.step()
    schedulers.end_all({"type": "length"})
    await draining
    assert (await reading)[-1] == Finished(FinishReason.LENGTH)
    assert schedulers.log == ["pause_generation", "continue_generation", "pause_generation"]


@pytest.mark.asyncio
async def test_closing_the_generator_frees_the_place() -> None:
    schedulers = Schedulers()
    engine = engine_over(schedulers)
    events = engine.generate(request())
    first = asyncio.create_task(anext(events))
    await settle()
    schedulers.step()
    await first
    await events.aclose()
    assert schedulers.log == ["abort"]
    assert (engine.counters.aborted, engine.counters.running) == (1, 0)


@pytest.mark.asyncio
async def test_a_tensor_that_does_not_fit_is_refused_before_anything_is_written() -> None:
    schedulers = Schedulers()
    engine = engine_over(schedulers)
    wrong = TensorSpec(name="w", element_type=ElementType.FLOAT32, shape=(2,))
    for in_place in (False, True):
        await engine.pause(InFlightPolicy.DRAIN)
        with pytest.raises(TensorMismatch):
            await engine.load_weights(tensors(wrong), version=1, in_place=in_place)
    assert "load" not in schedulers.log and engine.weight_version == 0


@pytest.mark.asyncio
async def test_a_worker_that_cannot_take_a_tensor_fails_the_engine_unless_in_place() -> None:
    schedulers = Schedulers()
    engine = engine_over(schedulers)
    await engine.pause(InFlightPolicy.DRAIN)
    schedulers.refused = {"load"}
    with pytest.raises(EngineFailed, match="cannot load"):
        await engine.load_weights(tensors(SPEC), version=1)
    with pytest.raises(RuntimeError, match="cannot load"):
        await engine.load_weights(tensors(SPEC), version=1, in_place=True)
    with pytest.raises(RuntimeError, match="the weights are a mixture: load all of them"):
        await engine.resume()
    schedulers.refused = set()
    await engine.load_weights(tensors(SPEC), version=2, in_place=True)
    await engine.resume()
    assert engine.weight_version == 2


@pytest.mark.asyncio
async def test_a_mixture_is_not_sampled_from_to_drain_what_was_kept() -> None:
    schedulers = Schedulers()
    engine = engine_over(schedulers)
    reading = asyncio.create_task(read(engine, request()))
    await settle()
    await engine.pause(InFlightPolicy.CONTINUE)
    schedulers.refused = {"load"}
    with pytest.raises(RuntimeError):
        await engine.load_weights(tensors(SPEC), version=1, in_place=True)
    await engine.pause(InFlightPolicy.DRAIN)
    assert "continue_generation" not in schedulers.log and not reading.done()
    await engine.aclose()
    await reading


@pytest.mark.asyncio
async def test_memory_goes_and_comes_once_per_kind() -> None:
    schedulers = Schedulers()
    engine = engine_over(schedulers, host=True)
    both = frozenset(MemoryKind)
    await engine.pause(InFlightPolicy.DRAIN)
    schedulers.log.clear()
    await engine.release_memory(both)
    await engine.release_memory(both)
    with pytest.raises(RuntimeError, match=r"memory is released \(kv_cache, weights\)"):
        await engine.resume()
    await engine.restore_memory(frozenset({MemoryKind.WEIGHTS}))
    await engine.restore_memory(both)
    assert schedulers.log == [
        "release ['kv_cache', 'weights']",
        "release_host_cache",
        "restore ['weights']",
        "restore_host_cache",
        "restore ['kv_cache']",
    ]
    await engine.resume()


@pytest.mark.asyncio
async def test_a_scheduler_that_ends_wakes_everyone() -> None:
    schedulers = Schedulers()
    engine = engine_over(schedulers, max_running=1)
    watch = asyncio.create_task(engine.wait_failed())
    running = asyncio.create_task(read(engine, request()))
    await settle()
    waiting = asyncio.create_task(read(engine, request()))
    draining = asyncio.create_task(engine.pause(InFlightPolicy.DRAIN))
    await settle()
    assert schedulers.failed is not None
    cause = RuntimeError("gone")
    schedulers.failed(cause)
    for task in (running, waiting, draining):
        with pytest.raises(EngineFailed, match="gone"):
            await task
    assert await watch is cause
    with pytest.raises(EngineFailed, match="gone"):
        await read(engine, request())
    await engine.aclose()


@pytest.mark.asyncio
async def test_a_cancelled_pause_does_not_cancel_its_message() -> None:
    """Its answer would be taken for that of the next one."""
    schedulers = Schedulers()
    stopped, answered = asyncio.Event(), asyncio.Event()

    async def pause_generation() -> None:
        stopped.set()
        await answered.wait()
        schedulers.log.append("answered")

    schedulers.pause_generation = pause_generation  # type: ignore[method-assign]
    engine = engine_over(schedulers)
    pausing = asyncio.create_task(engine.pause(InFlightPolicy.CONTINUE))
    await stopped.wait()
    pausing.cancel()
    await asyncio.wait({pausing})
    answered.set()
    await settle()
    await engine.resume()
    assert schedulers.log == ["answered", "continue_generation"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("said", "raised"),
    [
        (RuntimeError("no room"), RuntimeError),
        (CollectiveBroken("the update was given up"), asyncio.CancelledError),
    ],
)
async def test_an_abort_does_not_hide_why_a_worker_could_not_write(
    monkeypatch: pytest.MonkeyPatch, said: Exception, raised: type[BaseException]
) -> None:
    schedulers, ended = Schedulers(), threading.Event()
    engine = engine_over(schedulers)

    async def command(name: str, message: str = "") -> None:
        if name == "receive":
            await asyncio.to_thread(ended.wait)
            raise said

    schedulers.command = command  # type: ignore[method-assign]
    monkeypatch.setattr(engine_module, "fail_group", lambda group, cause: ended.set())
    group = CollectiveGroup(
        backend="gloo",
        rendezvous="127.0.0.1:1",
        group_name="g",
        world_size=2,
        first_rank=1,
        bucket_bytes=64,
        senders=(0,),
    )
    receiving = asyncio.create_task(engine.receive_weights(group, [SPEC], version=3))
    await settle()
    receiving.cancel()
    with pytest.raises(raised):
        await receiving
