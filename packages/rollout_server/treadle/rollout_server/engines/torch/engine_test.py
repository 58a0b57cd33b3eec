"""What the engine samples, against transformers."""

import asyncio

import pytest
import torch

from treadle.rollout_server.config.schema import ServedModelConfig, ServerConfig
from treadle.rollout_server.engine import (
    FinishReason,
    InFlightPolicy,
    Sampling,
)
from treadle.rollout_server.engines.torch import create
from treadle.rollout_server.engines.torch.testing.text_model import (
    EOS,
    TEXT_TYPES,
    VOCAB_SIZE,
    ModelDir,
    Output,
    collected,
    complete,
    hf_greedy,
    hf_logprobs,
    prompts,
    request,
    serving,
    weights_of,
)


@pytest.mark.asyncio
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "qwen3_moe", "llama"])
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
@pytest.mark.parametrize("architecture", TEXT_TYPES)
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
async def test_the_configuration_builds_it(model_dir: ModelDir) -> None:
    config = ServerConfig(
        engine="torch",
        model=ServedModelConfig(
            path=model_dir("qwen3"), context_length=64, num_threads=1, device="cpu"
        ),
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
    with pytest.raises(ValueError, match=r"set --model\.path"):
        await create(ServerConfig(engine="torch"))
