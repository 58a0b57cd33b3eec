"""The engine against transformers, on models made here."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from treadle.rollout_server.config import ModelConfig, ServerConfig
from treadle.rollout_server.engine import (
    ElementType,
    EngineCounters,
    EngineEvent,
    EngineRequest,
    Finished,
    FinishReason,
    InFlightPolicy,
    MemoryKind,
    NamedTensor,
    Sampling,
    Started,
    Tokens,
)
from treadle.rollout_server.engines.torch import ModelSource, TorchEngine, create
from treadle.rollout_server.engines.torch.conftest import EOS, VOCAB_SIZE, ModelDir, named_tensors
from treadle.rollout_server.errors import EngineFailed, TensorMismatch

GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


@contextlib.asynccontextmanager
async def serving(
    path: Path, *, max_num_seqs: int = 8, prefix_cache_bytes: int = 1 << 20
) -> AsyncIterator[TorchEngine]:
    engine = await TorchEngine.load(
        ModelSource(path=path, dtype=ElementType.FLOAT32, device="cpu"),
        max_num_seqs=max_num_seqs,
        num_threads=1,
        prefix_cache_bytes=prefix_cache_bytes,
    )
    try:
        yield engine
    finally:
        await engine.aclose()


@dataclass(frozen=True)
class Output:
    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    cached: int
    reason: FinishReason


def request(prompt: Sequence[int], sampling: Sampling = GREEDY, **kwargs: Any) -> EngineRequest:
    return EngineRequest(
        request_id="r", prompt=tuple(prompt), sampling=sampling, logprobs=True, **kwargs
    )


def collected(events: Sequence[EngineEvent]) -> Output:
    first, *middle, last = events
    assert isinstance(first, Started) and isinstance(last, Finished)
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for event in middle:
        assert isinstance(event, Tokens) and event.token_ids
        ids += event.token_ids
        logprobs += event.logprobs
        versions += [event.weight_version] * len(event.token_ids)
    return Output(ids, logprobs, versions, first.cached_prompt_tokens, last.reason)


async def submitted(engine: TorchEngine) -> None:
    """Returns when the tasks created so far have given their sequences to the engine."""
    for _ in range(2):  # The first lets the tasks start, the second comes after their calls.
        await engine._thread.call(lambda: None)


async def complete(
    engine: TorchEngine, prompt: Sequence[int], sampling: Sampling = GREEDY, **kwargs: Any
) -> Output:
    stream = engine.generate(request(prompt, sampling, **kwargs))
    return collected([event async for event in stream])


def hf(path: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
    return model.eval()


def hf_greedy(path: Path, prompt: Sequence[int], max_tokens: int) -> list[int]:
    inputs = torch.tensor([list(prompt)])
    ids = hf(path).generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return list(ids[0, len(prompt) :].tolist())


def hf_logprobs(path: Path, prompt: Sequence[int], ids: list[int]) -> torch.Tensor:
    """Log-probs of `ids` after `prompt`, [len(ids)], at temperature 1."""
    with torch.no_grad():
        logits = hf(path)(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    logprobs: torch.Tensor = logits.log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0]


def prompts(count: int, *, shared: int = 0, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist()

    common = draw(shared)
    return [common + draw(3 + 5 * (i % 4)) for i in range(count)]


LONG = Sampling(max_tokens=110, temperature=0.0, ignore_eos=True)


async def paused_in_flight(
    engine: TorchEngine, policy: InFlightPolicy, *, steps: int = 5
) -> tuple[list[EngineEvent], Any]:
    """Starts a long greedy completion, stops it after some steps, then pauses as told."""
    core, step = engine._core, engine._core.step
    standing = asyncio.Event()
    countdown = iter(range(steps - 1, -1, -1))

    def step_and_stop() -> None:
        step()
        if next(countdown) == 0:
            core.step = step  # type: ignore[method-assign]
            core.pause(InFlightPolicy.CONTINUE, standing.set)

    core.step = step_and_stop  # type: ignore[method-assign]
    stream = engine.generate(request([5, 6, 7], LONG))
    events = [await anext(stream)]
    await standing.wait()
    await engine.pause(policy)
    return events, stream


async def weights_of(path: Path, **changes: torch.Tensor | None) -> AsyncIterator[NamedTensor]:
    for tensor in named_tensors(path, **changes):
        yield tensor


@pytest.mark.asyncio
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
async def test_greedy_equals_transformers(architecture: str, model_dir: ModelDir) -> None:
    path = model_dir(architecture)
    asked = prompts(6)
    async with serving(path) as engine:
        outputs = await asyncio.gather(*[complete(engine, prompt) for prompt in asked])
    for prompt, output in zip(asked, outputs, strict=True):
        assert output.ids == hf_greedy(path, prompt, 12)
        assert output.logprobs == [0.0] * 12
        assert output.reason is FinishReason.LENGTH


@pytest.mark.asyncio
@pytest.mark.parametrize("call_cost", [1, 1024], ids=["reads prefix once", "reads all"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
async def test_logprobs_equal_a_forward_pass(
    architecture: str, call_cost: int, model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.rollout_server.engines.torch.attention._CALL_COST", call_cost)
    path = model_dir(architecture)
    sampling = Sampling(max_tokens=20, seed=5, ignore_eos=True)
    asked = prompts(6, shared=9)
    async with serving(path, max_num_seqs=3) as engine:
        outputs = await asyncio.gather(*[complete(engine, p, sampling) for p in asked])
    assert any(output.cached for output in outputs)
    for prompt, output in zip(asked, outputs, strict=True):
        want = hf_logprobs(path, prompt, output.ids)
        torch.testing.assert_close(torch.tensor(output.logprobs), want, rtol=0, atol=1e-4)


@pytest.mark.asyncio
async def test_a_sequence_is_the_same_whenever_it_joins(model_dir: ModelDir) -> None:
    sampling = [Sampling(max_tokens=4 + 3 * i, seed=i, ignore_eos=True) for i in range(7)]
    asked = prompts(7, shared=40)
    async with serving(model_dir(), max_num_seqs=1, prefix_cache_bytes=0) as engine:
        alone = [await complete(engine, p, s) for p, s in zip(asked, sampling, strict=True)]
    async with serving(model_dir(), max_num_seqs=3) as engine:
        streams = [engine.generate(request(p, s)) for p, s in zip(asked, sampling, strict=True)]

        async def follow(index: int) -> Output:
            """Starts the next sequence at its own first event, so that they overlap."""
            events = [await anext(streams[index])]
            async with asyncio.TaskGroup() as group:
                later = group.create_task(follow(index + 1)) if index + 1 < 7 else None
                events += [event async for event in streams[index]]
            outputs[index] = collected(events)
            assert later is None or later.done()
            return outputs[index]

        outputs: dict[int, Output] = {}
        await follow(0)
    for index, want in enumerate(alone):
        assert outputs[index].ids == want.ids
        assert outputs[index].logprobs == pytest.approx(want.logprobs, abs=1e-4)


@pytest.mark.asyncio
async def test_siblings_and_next_turns_find_their_prefix(model_dir: ModelDir) -> None:
    (prompt,) = prompts(1, shared=50)
    async with serving(model_dir()) as engine:
        group = await asyncio.gather(*[complete(engine, prompt) for _ in range(4)])
        assert sorted(output.cached for output in group) == [0] + [len(prompt) - 1] * 3
        turn = [*prompt, *group[0].ids, 9, 8, 7]
        second = await complete(engine, turn)
        # The last sampled id was never read, so its cache entry does not exist.
        assert second.cached == len(prompt) + 11
        assert second.ids == hf_greedy(model_dir(), turn, 12)


@pytest.mark.asyncio
async def test_the_prefix_cache_forgets_old_weights(model_dir: ModelDir) -> None:
    (prompt,) = prompts(1, shared=50)
    async with serving(model_dir()) as engine:
        await complete(engine, prompt)
        await engine.pause(InFlightPolicy.DRAIN)
        await engine.load_weights(weights_of(model_dir(seed=1)), version=4)
        await engine.resume()
        output = await complete(engine, prompt)
    assert (output.cached, output.versions) == (0, [4] * 12)
    assert output.ids == hf_greedy(model_dir(seed=1), prompt, 12)


@pytest.mark.asyncio
async def test_prompts_longer_than_a_step_are_read_in_chunks(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.rollout_server.engines.torch.core._STEP_TOKENS", 16)
    asked = [*prompts(4, seed=3), *prompts(1, shared=90), *prompts(3, seed=4)]
    async with serving(model_dir(), max_num_seqs=5) as engine:
        alone = await complete(engine, [9] * 70)  # Its first steps sample nothing.
        assert alone.ids == hf_greedy(model_dir(), [9] * 70, 12)
        outputs = await asyncio.gather(*[complete(engine, prompt) for prompt in asked])
    for prompt, output in zip(asked, outputs, strict=True):
        assert output.ids == hf_greedy(model_dir(), prompt, 12)


@pytest.mark.asyncio
async def test_a_seed_repeats_and_no_seed_does_not(model_dir: ModelDir) -> None:
    (prompt,) = prompts(1)
    seeded = Sampling(max_tokens=30, seed=11, ignore_eos=True)
    free = Sampling(max_tokens=30, ignore_eos=True)
    async with serving(model_dir()) as engine:
        first = await complete(engine, prompt, seeded)
        crowd = [complete(engine, p, free) for p in prompts(5, seed=9)]
        again, *_ = await asyncio.gather(complete(engine, prompt, seeded), *crowd)
        other = [await complete(engine, prompt, free) for _ in range(2)]
        # What a client does that lost the stream after ten tokens.
        rest = await complete(
            engine,
            [*prompt, *first.ids[:10]],
            Sampling(max_tokens=20, seed=11, ignore_eos=True),
        )
    assert again.ids == first.ids
    assert other[0].ids != other[1].ids
    assert first.ids[10:] == rest.ids


@pytest.mark.asyncio
async def test_stop_ids_end_a_completion_and_belong_to_it(model_dir: ModelDir) -> None:
    (prompt,) = prompts(1)
    async with serving(model_dir()) as engine:
        free = (await complete(engine, prompt)).ids
        stop = free[4]
        sampling = Sampling(
            max_tokens=12, temperature=0.0, stop_token_ids=frozenset({stop}), ignore_eos=True
        )
        stopped = await complete(engine, prompt, sampling)
        assert stopped.ids == free[: free.index(stop) + 1]
        assert stopped.reason is FinishReason.STOP


@pytest.mark.asyncio
async def test_end_of_sequence_ends_a_completion_unless_ignored(model_dir: ModelDir) -> None:
    (prompt,) = prompts(1)
    async with serving(model_dir()) as engine:
        for seed in range(200):
            sampling = Sampling(max_tokens=60, seed=seed)
            output = await complete(engine, prompt, sampling)
            if output.reason is FinishReason.STOP:
                break
        assert output.ids[-1] == EOS and EOS not in output.ids[:-1]
        going_on = Sampling(max_tokens=60, seed=seed, ignore_eos=True)
        longer = await complete(engine, prompt, going_on)
        assert longer.ids[: len(output.ids)] == output.ids and len(longer.ids) == 60


@pytest.mark.asyncio
async def test_the_context_bounds_a_completion(model_dir: ModelDir) -> None:
    async with serving(model_dir()) as engine:
        assert engine.info.model.context_length == 512
        output = await complete(
            engine, [5] * 504, Sampling(max_tokens=50, temperature=0.0, ignore_eos=True)
        )
    assert (len(output.ids), output.reason) == (8, FinishReason.LENGTH)


@pytest.mark.asyncio
async def test_closing_a_stream_frees_its_place(model_dir: ModelDir) -> None:
    async with serving(model_dir(), max_num_seqs=1) as engine:
        _, running = await paused_in_flight(engine, InFlightPolicy.CONTINUE)
        waiting = engine.generate(request([7]))
        queued = asyncio.ensure_future(anext(waiting))
        await submitted(engine)
        queued.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await queued
        await running.aclose()
        assert engine.counters == EngineCounters(started=1, aborted=1)
        await engine.resume()
        assert len((await complete(engine, [8])).ids) == 12
        assert engine.counters == EngineCounters(started=2, aborted=1, finished=1)


@pytest.mark.asyncio
async def test_higher_priority_runs_first(model_dir: ModelDir) -> None:
    order: list[int] = []

    async def run(priority: int) -> None:
        await complete(engine, [5, 6, 7], priority=priority)
        order.append(priority)

    async with serving(model_dir(), max_num_seqs=1) as engine:
        await engine.pause(InFlightPolicy.DRAIN)
        async with asyncio.TaskGroup() as group:
            for priority in (0, 2, 1):
                group.create_task(run(priority))
            await submitted(engine)
            await engine.resume()
    assert order == [2, 1, 0]


@pytest.mark.asyncio
async def test_drain_lets_the_running_end_and_nothing_start(model_dir: ModelDir) -> None:
    async with serving(model_dir()) as engine:
        events, stream = await paused_in_flight(engine, InFlightPolicy.DRAIN)
        assert engine.counters.running == 0
        output = collected(events + [event async for event in stream])
        assert (len(output.ids), output.reason) == (110, FinishReason.LENGTH)
        waiting = asyncio.ensure_future(complete(engine, [9]))
        await engine.load_weights(weights_of(model_dir(seed=1)), version=1)
        assert engine.counters.started == 1
        await engine.resume()
        assert (await waiting).versions == [1] * 12


@pytest.mark.asyncio
async def test_interrupt_ends_the_running_now(model_dir: ModelDir) -> None:
    async with serving(model_dir()) as engine:
        events, stream = await paused_in_flight(engine, InFlightPolicy.INTERRUPT)
        output = collected(events + [event async for event in stream])
        assert output.reason is FinishReason.INTERRUPTED
        assert output.ids == hf_greedy(model_dir(), [5, 6, 7], 5)
        assert engine.counters == EngineCounters(started=1, finished=1)


@pytest.mark.asyncio
async def test_continue_goes_on_with_the_new_weights_in_a_new_chunk(model_dir: ModelDir) -> None:
    async with serving(model_dir()) as engine:
        events, stream = await paused_in_flight(engine, InFlightPolicy.CONTINUE)
        await engine.load_weights(weights_of(model_dir(seed=1)), version=1)
        assert engine.weight_version == 1
        await engine.resume()
        output = collected(events + [event async for event in stream])
        assert output.versions == [0] * 5 + [1] * 105
        assert output.ids[:5] == hf_greedy(model_dir(), [5, 6, 7], 5)
        # The row is a mixture of both weights and serves nobody else.
        assert (await complete(engine, [5, 6, 7, *output.ids[:5]])).cached == 0


@pytest.mark.asyncio
async def test_the_tokens_after_continue_are_sampled_over_the_kept_cache(
    model_dir: ModelDir,
) -> None:
    async with serving(model_dir()) as engine:
        events, stream = await paused_in_flight(engine, InFlightPolicy.CONTINUE)
        await engine.load_weights(weights_of(model_dir(seed=1)), version=1)
        await engine.resume()
        output = collected(events + [event async for event in stream])
    old, new = hf(model_dir()), hf(model_dir(seed=1))
    read = [5, 6, 7, *output.ids[:5]]
    with torch.no_grad():
        kept = old(torch.tensor([read[:-1]]), use_cache=True).past_key_values
        logits = new(torch.tensor([read[-1:]]), past_key_values=kept).logits
    assert int(logits[0, -1].argmax()) == output.ids[5]


@pytest.mark.asyncio
async def test_interrupt_after_continue_ends_what_stood_still(model_dir: ModelDir) -> None:
    async with serving(model_dir()) as engine:
        events, stream = await paused_in_flight(engine, InFlightPolicy.CONTINUE)
        await engine.pause(InFlightPolicy.INTERRUPT)
        output = collected(events + [event async for event in stream])
        assert output.reason is FinishReason.INTERRUPTED


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model.norm.weight": torch.zeros(31)},
            r"norm\.weight\' is float32\[31\], .*float32\[32\]",
        ),
        ({"model.norm.weight": None}, r"'model\.norm\.weight' is absent"),
        (
            {"lm_head.weight": torch.zeros(61, 32)},
            r"'lm_head\.weight' is float32\[61, 32\], .*absent",
        ),
    ],
    ids=["shape", "missing", "tied head"],
)
async def test_weights_that_do_not_fit_change_nothing(
    changes: dict[str, torch.Tensor | None], message: str, model_dir: ModelDir
) -> None:
    async with serving(model_dir()) as engine:
        await engine.pause(InFlightPolicy.DRAIN)
        with pytest.raises(TensorMismatch, match=message):
            await engine.load_weights(weights_of(model_dir(seed=1), **changes), version=1)
        await engine.resume()
        output = await complete(engine, [5, 6, 7])
    assert output.versions == [0] * 12
    assert output.ids == hf_greedy(model_dir(), [5, 6, 7], 12)


@pytest.mark.asyncio
async def test_memory_is_released_and_restored(model_dir: ModelDir) -> None:
    everything = frozenset(MemoryKind)
    async with serving(model_dir()) as engine:
        before = await complete(engine, [5, 6, 7])
        await engine.pause(InFlightPolicy.DRAIN)
        await engine.release_memory(everything)
        with pytest.raises(RuntimeError, match=r"released \(kv_cache, weights\): restore it"):
            await engine.resume()
        await engine.release_memory(everything)
        await engine.restore_memory(everything)
        await engine.resume()
        after = await complete(engine, [5, 6, 7])
        assert (after.ids, after.cached) == (before.ids, 0)
        events, stream = await paused_in_flight(engine, InFlightPolicy.CONTINUE)
        with pytest.raises(RuntimeError, match="1 sequences are in flight: pause with DRAIN"):
            await engine.release_memory(everything)
        assert events
        await stream.aclose()


@pytest.mark.asyncio
async def test_broken_weights_fail_every_sequence_and_the_engine(model_dir: ModelDir) -> None:
    async with serving(model_dir()) as engine:
        await engine.pause(InFlightPolicy.DRAIN)
        broken = torch.full((32,), torch.nan)
        changes = {"model.norm.weight": broken}
        await engine.load_weights(weights_of(model_dir(), **changes), version=1)
        await engine.resume()
        outcomes = await asyncio.gather(
            *[complete(engine, prompt) for prompt in prompts(3)], return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [EngineFailed] * 3
        assert "not finite" in str(outcomes[0])
        for call in (
            complete(engine, [5]),
            engine.pause(InFlightPolicy.DRAIN),
            engine.resume(),
        ):
            with pytest.raises(EngineFailed, match="not finite"):
                await call


@pytest.mark.asyncio
async def test_closing_the_engine_interrupts_the_running_and_the_waiting(
    model_dir: ModelDir,
) -> None:
    async with serving(model_dir(), max_num_seqs=1) as engine:
        events, stream = await paused_in_flight(engine, InFlightPolicy.CONTINUE)
        waiting = asyncio.ensure_future(complete(engine, [8]))
        await submitted(engine)
        await engine.aclose()
        await engine.aclose()
        output = collected(events + [event async for event in stream])
        assert output.reason is FinishReason.INTERRUPTED
        assert (await waiting).reason is FinishReason.INTERRUPTED
        assert (await complete(engine, [9])).reason is FinishReason.INTERRUPTED
        counters = engine.counters
        assert counters.started == counters.finished and not counters.running


@pytest.mark.asyncio
async def test_the_configuration_builds_it(model_dir: ModelDir) -> None:
    config = ServerConfig(
        engine="torch",
        model=ModelConfig(path=model_dir("qwen3"), context_length=64, num_threads=1, device="cpu"),
    )
    engine = await create(config)
    try:
        assert engine.info.name == "torch"
        assert engine.info.model.architecture == "Qwen3ForCausalLM"
        assert engine.info.model.vocab_size == VOCAB_SIZE
        assert engine.info.model.context_length == 64
        assert engine.info.model.eos_token_ids == {EOS}
    finally:
        await engine.aclose()


@pytest.mark.asyncio
async def test_a_configuration_without_a_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"give --model\.path"):
        await create(ServerConfig(engine="torch"))
