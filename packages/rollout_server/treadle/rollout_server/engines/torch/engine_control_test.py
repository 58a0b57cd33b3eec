"""Pauses, updates, memory and ends: what happens to an engine while sequences run."""

import asyncio
import contextlib

import pytest
import torch

from treadle.rollout_server.engine import (
    EngineCounters,
    FinishReason,
    InFlightPolicy,
    MemoryKind,
    PromptLogprobs,
    Tokens,
)
from treadle.rollout_server.engines.torch.testing.text_model import (
    ModelDir,
    assert_chosen,
    collected,
    complete,
    hf,
    hf_greedy,
    hf_logprobs,
    paused_in_flight,
    prompts,
    request,
    serving,
    submitted,
    weights_of,
)
from treadle.rollout_server.errors import EngineFailed, TensorMismatch


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
async def test_a_prompt_that_is_half_read_is_read_again_by_the_new_weights(
    model_dir: ModelDir,
) -> None:
    old, new = model_dir("qwen3_moe"), model_dir("qwen3_moe", seed=1)
    wanted = {"prompt_logprobs_from": 1, "routed_experts_from": 0}
    async with serving(old) as engine:
        engine._core._scheduler.max_step_tokens = 1
        events, stream = await paused_in_flight(engine, InFlightPolicy.CONTINUE, steps=1, **wanted)
        await engine.load_weights(weights_of(new), version=1)
        await engine.resume()
        events += [event async for event in stream]
        scores = [event for event in events if isinstance(event, PromptLogprobs)]
        output = collected([event for event in events if event not in scores])
        assert output.versions == [1] * 110
        assert output.ids == hf_greedy(new, [5, 6, 7], 110)
        routed = b"".join(event.routed_experts for event in events if isinstance(event, Tokens))
        assert_chosen(new, [5, 6, 7, *output.ids], 0, routed)
        # The first was reported before the update, and only once.
        assert [(score.weight_version, len(score.logprobs)) for score in scores] == [(0, 1), (1, 1)]
        for path, score, place in zip((old, new), scores, (1, 2), strict=True):
            (want,) = hf_logprobs(path, [5, 6, 7][:place], [5, 6, 7][place : place + 1])
            assert score.logprobs[0] == pytest.approx(float(want), abs=1e-5)
        # The row is of one kind of weights.
        assert (await complete(engine, [5, 6, 7, *output.ids])).cached > 100


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
        watching = asyncio.create_task(engine.wait_failed())
        outcomes = await asyncio.gather(
            *[complete(engine, prompt) for prompt in prompts(3)], return_exceptions=True
        )
        assert "not finite" in str(await watching)
        assert "not finite" in str(await engine.wait_failed())
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
async def test_a_pause_that_waits_fails_with_the_engine(model_dir: ModelDir) -> None:
    async with serving(model_dir()) as engine:
        _, stream = await paused_in_flight(engine, InFlightPolicy.CONTINUE)
        changes = {"model.norm.weight": torch.full((32,), torch.nan)}
        await engine.load_weights(weights_of(model_dir(), **changes), version=1)
        with pytest.raises(EngineFailed, match="not finite"):
            await engine.pause(InFlightPolicy.DRAIN)
        with pytest.raises(EngineFailed, match="not finite"):
            [event async for event in stream]
