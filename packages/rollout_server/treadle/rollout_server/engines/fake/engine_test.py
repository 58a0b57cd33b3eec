import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import pytest

from treadle.conformance.contracts.image_contract import ImageContract
from treadle.conformance.contracts.in_process_contract import InProcessContract
from treadle.conformance.contracts.reader import Reader, request, run
from treadle.rollout_server.config.schema import ServedModelConfig, ServerConfig
from treadle.rollout_server.engine import (
    ElementType,
    Engine,
    EngineEvent,
    EngineRequest,
    InFlightPolicy,
    MemoryKind,
    ModelInfo,
    NamedTensor,
    PromptImage,
    Sampling,
    Started,
    TensorSpec,
)
from treadle.rollout_server.engines.fake.engine import FakeEngine, FakeLatency, create
from treadle.rollout_server.engines.fake.model import fingerprint_entry, fingerprint_of
from treadle.rollout_server.testing.clock import FakeClock

MODEL = ModelInfo(
    architecture="fake", vocab_size=64, context_length=1024, eos_token_ids=frozenset({0, 1})
)
PARAMETERS = tuple(
    TensorSpec(name=name, element_type=ElementType.FLOAT32, shape=(3, 2)) for name in ("a", "b")
)


def tensors(which: int) -> list[NamedTensor]:
    return [
        NamedTensor(spec=spec, data=memoryview(bytearray([which + 1] * spec.size_bytes)))
        for spec in PARAMETERS
    ]


class TestFakeEngine(InProcessContract):
    """tests/engines/conformance_test.py has the rest of the contract, over gRPC."""

    @asynccontextmanager
    async def engine(self, weights: int = 0) -> AsyncIterator[Engine]:
        engine = FakeEngine(
            model=MODEL,
            parameters=PARAMETERS,
            max_running=8,
            fingerprint=fingerprint_of(map(fingerprint_entry, tensors(weights))),
            clock=asyncio.get_running_loop(),
        )
        yield engine
        await engine.aclose()

    def weights(self, which: int) -> Sequence[NamedTensor]:
        return tensors(which)


class TestFakeEngineSees(ImageContract):
    @asynccontextmanager
    async def engine(self, weights: int = 0) -> AsyncIterator[Engine]:
        engine = FakeEngine(model=MODEL, clock=asyncio.get_running_loop())
        yield engine
        await engine.aclose()

    def pictured(self, which: int) -> tuple[tuple[int, ...], PromptImage]:
        prompt = (*range(2, 22), *[60] * 9, *range(2, 42))
        image = PromptImage(data=b"RIFF%d" % which, media_type="image/webp", start=20, num_tokens=9)
        return prompt, image


def fake(clock: FakeClock, **settings: object) -> FakeEngine:
    return FakeEngine(model=MODEL, clock=clock, **settings)  # type: ignore[arg-type]


async def settle() -> None:
    """Lets every task that can run, run; nothing here waits for real time."""
    for _ in range(20):
        await asyncio.sleep(0)


def of_priority(priority: int) -> EngineRequest:
    return EngineRequest(
        request_id=f"p{priority}",
        prompt=(3,),
        sampling=Sampling(max_tokens=1, ignore_eos=True),
        priority=priority,
    )


@pytest.mark.asyncio
async def test_latency_is_a_straight_line_in_uncached_prompt_and_sampled_tokens() -> None:
    clock = FakeClock()
    latency = FakeLatency(prefill_s_per_token=1.0, decode_s_per_token=10.0)
    engine = fake(clock, latency=latency)
    ends = []
    for _ in range(2):
        begin = clock.time()
        reader = Reader(engine, request(tuple(range(40)), max_tokens=3))
        await settle()
        while not reader.done:
            assert clock.next_timer is not None
            clock.advance(clock.next_timer - clock.time())
            await settle()
        ends.append((clock.time() - begin, (await reader.output()).cached_prompt_tokens))
    assert ends == [(40 + 30, 0), (8 + 30, 32)]


@pytest.mark.asyncio
async def test_places_go_to_the_highest_priority_then_to_the_first() -> None:
    clock = FakeClock()
    engine = fake(clock, max_running=1, latency=FakeLatency(decode_s_per_token=1.0))
    order: list[str] = []

    async def consume(wanted: EngineRequest, name: str) -> None:
        async with aclosing(engine.generate(wanted)) as events:
            async for event in events:
                if isinstance(event, Started):
                    order.append(name)

    async with asyncio.TaskGroup() as group:
        for index, priority in enumerate((0, 0, 5, -1, 5)):
            group.create_task(consume(of_priority(priority), f"{index}:{priority}"))
        for _ in range(5):
            await settle()
            clock.advance(1.0)
    assert order == ["0:0", "2:5", "4:5", "1:0", "3:-1"]


@pytest.mark.asyncio
async def test_a_cancelled_wait_for_a_place_leaks_no_place() -> None:
    clock = FakeClock()
    engine = fake(clock, max_running=1, latency=FakeLatency(decode_s_per_token=1.0))
    running = Reader(engine, of_priority(0))
    await settle()
    waiting = Reader(engine, of_priority(0))
    await settle()
    clock.advance(1.0)
    await settle()
    assert running.done
    await waiting.abort()
    last = Reader(engine, of_priority(0))
    await settle()
    clock.advance(1.0)
    await last.output()
    assert engine.counters.running == 0


@pytest.mark.asyncio
async def test_a_place_given_to_a_cancelled_waiter_is_handed_on() -> None:
    engine = fake(FakeClock(), max_running=1)
    first = engine.generate(of_priority(0))
    await anext(first)
    second: asyncio.Task[EngineEvent] = asyncio.ensure_future(
        anext(engine.generate(of_priority(0)))
    )
    third = Reader(engine, of_priority(0))
    await settle()
    await first.aclose()  # gives the place to the second ...
    second.cancel()  # ... which is cancelled before it can run
    assert (await third.output()).token_ids


@pytest.mark.asyncio
async def test_unseeded_draws_repeat_from_engine_to_engine() -> None:
    wanted = request(temperature=1.0)
    outputs = [
        [await run(engine, wanted) for _ in range(3)]
        for engine in (fake(FakeClock()), fake(FakeClock()))
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.asyncio
async def test_released_cache_is_empty_and_resume_needs_restore() -> None:
    engine = fake(FakeClock())
    await run(engine, request(tuple(range(40))))
    await engine.pause(InFlightPolicy.DRAIN)
    await engine.release_memory(frozenset({MemoryKind.KV_CACHE}))
    with pytest.raises(AssertionError, match="restore"):
        await engine.resume()
    await engine.restore_memory(frozenset(MemoryKind))
    await engine.resume()
    assert (await run(engine, request(tuple(range(40))))).cached_prompt_tokens == 0


@pytest.mark.parametrize(
    "model", [ServedModelConfig(max_draft_tokens=4), ServedModelConfig(batch_invariant=True)]
)
@pytest.mark.asyncio
async def test_what_only_the_torch_engine_has_is_refused(model: ServedModelConfig) -> None:
    with pytest.raises(ValueError, match="engine 'fake' does not support: only the torch engine"):
        await create(ServerConfig(engine="fake", model=model))
