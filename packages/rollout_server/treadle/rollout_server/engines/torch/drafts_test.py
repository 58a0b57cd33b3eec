"""Output with drafts is that without them, to the bit, whatever happens to a sequence."""

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

from treadle.rollout_server.engine import (
    EngineRequest,
    FinishReason,
    InFlightPolicy,
    PromptLogprobs,
    Sampling,
    Started,
    Tokens,
)
from treadle.rollout_server.engines.torch import core
from treadle.rollout_server.engines.torch.engine import TorchEngine
from treadle.rollout_server.engines.torch.scheduler import ScheduledIds, Scheduler
from treadle.rollout_server.engines.torch.testing.text_model import (
    LONG,
    ModelDir,
    collected,
    complete,
    paused_in_flight,
    prompts,
    request,
    serving,
    submitted,
    weights_of,
)


class Told(NamedTuple):
    """All that a sequence told."""

    ids: list[int]
    logprobs: list[float]
    masks: list[bytes]
    experts: bytes
    prompt_logprobs: list[float]
    reason: FinishReason


async def told(engine: TorchEngine, asked: EngineRequest) -> Told:
    ids: list[int] = []
    logprobs: list[float] = []
    masks: list[bytes] = []
    experts = b""
    of_prompt: list[float] = []
    async for event in engine.generate(asked):
        if isinstance(event, Tokens):
            ids += event.token_ids
            logprobs += event.logprobs
            masks += event.sampling_masks
            experts += event.routed_experts
        elif isinstance(event, PromptLogprobs):
            of_prompt += event.logprobs
        elif not isinstance(event, Started):
            return Told(ids, logprobs, masks, experts, of_prompt, event.reason)
    raise AssertionError("it did not end")


def many(count: int) -> list[EngineRequest]:
    """Requests in groups of three that share a prompt, with settings of all kinds."""
    draws = Random(0)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.3},
        {"temperature": 0.3, "top_k": 4},
        {"temperature": 0.5, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 0.4, "repetition_penalty": 1.1},
        {"temperature": 0.3, "stop_token_ids": frozenset(range(20, 24))},
    ]
    asked = []
    for i, prompt in enumerate(prompts(-(-count // 3), shared=80)):
        for sample in range(3):
            kind = kinds[(i + sample) % len(kinds)]
            sampling = Sampling(
                max_tokens=draws.randrange(1, 40),
                seed=sample % 2,
                ignore_eos=sample != 2,
                **kind,
            )
            masked = bool(sampling.top_k) or sampling.top_p < 1
            more = {"prompt_logprobs_from": 70} if sample == 1 else {}
            asked.append(request(prompt, sampling, sampling_mask=masked, **more))
    return asked


async def all_told(engine: TorchEngine, asked: Sequence[EngineRequest]) -> list[Told]:
    return list(await asyncio.gather(*[told(engine, one) for one in asked]))


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
@pytest.mark.asyncio
async def test_output_is_that_without_drafts(model_dir: ModelDir, architecture: str) -> None:
    path, asked = model_dir(architecture), many(36)
    async with serving(path, max_num_seqs=1, prefix_cache_bytes=0, batch_invariant=True) as engine:
        alone = await all_told(engine, asked)
        assert engine.counters.drafted == 0
        assert engine.counters.passes == sum(len(one.ids) for one in alone)
    assert {one.reason for one in alone} == {FinishReason.STOP, FinishReason.LENGTH}
    async with serving(path, max_draft_tokens=7) as engine:
        for _ in range(3):  # What was sampled before is drafted, and more of it each time.
            assert await all_told(engine, asked) == alone
        counters = engine.counters
    assert 0 < counters.accepted < counters.drafted
    assert counters.passes + counters.accepted >= 3 * sum(len(one.ids) for one in alone)
    assert counters.passes < 2 * sum(len(one.ids) for one in alone)


@pytest.mark.asyncio
async def test_experts_are_those_of_the_tokens_that_were_kept(model_dir: ModelDir) -> None:
    sampling = Sampling(max_tokens=30, temperature=0.3, seed=4, ignore_eos=True)
    asked = [request(p, sampling, routed_experts_from=2) for p in prompts(6, shared=40)]
    async with serving(model_dir("qwen3_moe")) as engine:
        plain = await all_told(engine, asked)
    async with serving(model_dir("qwen3_moe"), max_draft_tokens=7) as engine:
        for _ in range(3):
            drafted = await all_told(engine, asked)
            for one, other in zip(plain, drafted, strict=True):
                assert (one.ids, one.experts) == (other.ids, other.experts)
                # An expert reads few rows at a time, whose number depends on the others.
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert engine.counters.accepted


@pytest.mark.asyncio
async def test_a_sequence_that_a_pause_keeps_continues_with_new_weights(
    model_dir: ModelDir,
) -> None:
    async def told_across(engine: TorchEngine, steps: int) -> tuple[list[int], list[float], int]:
        events, stream = await paused_in_flight(engine, InFlightPolicy.CONTINUE, steps=steps)
        await engine.load_weights(weights_of(model_dir(seed=1)), version=1)
        await engine.resume()
        output = collected([*events, *[event async for event in stream]])
        return output.ids, output.logprobs, output.versions.count(0)

    async with serving(model_dir(), max_draft_tokens=7) as engine:
        for _ in range(2):
            await complete(engine, [5, 6, 7], LONG)
        passes = engine.counters.passes
        drafted = await told_across(engine, 6)
        assert engine.counters.passes - passes < len(drafted[0])
    assert 6 < drafted[2] < LONG.max_tokens
    async with serving(model_dir(), batch_invariant=True) as engine:
        assert await told_across(engine, drafted[2]) == drafted


@pytest.mark.asyncio
async def test_a_caller_that_leaves_changes_no_other_sequence(model_dir: ModelDir) -> None:
    asked = many(9)
    async with serving(model_dir(), max_draft_tokens=7) as engine:
        alone = await all_told(engine, asked)
        _, leaving = await paused_in_flight(engine, InFlightPolicy.CONTINUE)
        others = asyncio.ensure_future(all_told(engine, asked))
        await engine.resume()
        await leaving.aclose()
        assert await others == alone
        counters = engine.counters
        assert (counters.running, counters.aborted) == (0, 1)


@pytest.mark.asyncio
async def test_a_prompt_is_read_as_if_nothing_were_drafted(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[bool, int]] = []
    plan = Scheduler.plan

    def recorded(scheduler: Scheduler) -> list[ScheduledIds]:
        work = plan(scheduler)
        unread = sum(one.num_uncached for one in scheduler.running) > scheduler.max_step_tokens
        drafted = sum(max(0, ids - one.num_uncached) for one, ids in work)
        steps.append((unread, drafted))
        return work

    monkeypatch.setattr(core, "_STEP_TOKENS", 24)
    monkeypatch.setattr(Scheduler, "plan", recorded)
    async with serving(model_dir(), max_draft_tokens=7) as engine:
        await complete(engine, [5, 6, 7], LONG)
        events, stream = await paused_in_flight(engine, InFlightPolicy.CONTINUE)
        late = asyncio.ensure_future(complete(engine, prompts(1, shared=200)[0]))
        await submitted(engine)
        await engine.resume()
        assert collected([*events, *[event async for event in stream]]).ids
        await late
    assert sum(unread for unread, _ in steps) > 5
    assert not any(drafted for unread, drafted in steps if unread)
    assert any(drafted for _, drafted in steps)


@pytest.mark.asyncio
async def test_a_state_that_cannot_be_cut_back_is_refused(model_dir: ModelDir) -> None:
    with pytest.raises(ValueError, match=r"model\.max_draft_tokens: this model has a state"):
        async with serving(model_dir("qwen3_next"), max_draft_tokens=1):
            pass


@pytest.mark.asyncio
async def test_the_same_bits_in_every_batch_are_refused_of_a_model_with_experts(
    model_dir: ModelDir,
) -> None:
    with pytest.raises(ValueError, match=r"model\.batch_invariant: the model has experts.*leave"):
        async with serving(model_dir("qwen3_moe"), batch_invariant=True):
            pass


@pytest.mark.asyncio
async def test_the_same_bits_in_every_batch_are_refused_without_mkl(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"model\.batch_invariant: .*with MKL"):
        async with serving(model_dir(), batch_invariant=True):
            pass
    async with serving(model_dir(), max_draft_tokens=1) as engine:
        assert (await complete(engine, [5, 6, 7])).ids
