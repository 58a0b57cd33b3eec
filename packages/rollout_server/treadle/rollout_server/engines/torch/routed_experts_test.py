"""The experts that the engine reports, against those that transformers chooses."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from treadle.rollout_server.engine import InFlightPolicy, Sampling, Tokens
from treadle.rollout_server.engines.torch.engine import TorchEngine
from treadle.rollout_server.engines.torch.testing.text_model import (
    ModelDir,
    assert_chosen,
    prompts,
    request,
    serving,
)

SAMPLING = Sampling(max_tokens=20, seed=5, ignore_eos=True)


async def run(
    engine: TorchEngine, prompt: Sequence[int], first: int | None, **kwargs: Any
) -> tuple[list[int], bytes]:
    ids, routed = list(prompt), b""
    async for event in engine.generate(
        request(prompt, SAMPLING, routed_experts_from=first, **kwargs)
    ):
        if isinstance(event, Tokens):
            ids += event.token_ids
            routed += event.routed_experts
    return ids, routed


@pytest.mark.asyncio
async def test_they_are_those_of_transformers_also_of_cached_rows(model_dir: ModelDir) -> None:
    """Rows are copied from running sequences, and from sequences that have ended."""
    path = model_dir("qwen3_moe")
    asked = prompts(6, shared=40)
    async with serving(path, max_num_seqs=3) as engine:
        info = engine.info
        assert info.capabilities.routed_experts
        outputs = await asyncio.gather(*[run(engine, prompt, 0) for prompt in asked])
        for ids, routed in outputs:
            assert_chosen(path, ids, 0, routed)
        ids, routed = outputs[0]
        # The next turn: the rows of the last token, of a tool result and of the completion.
        after, more = await run(engine, [*ids, 7, 8, 9], len(ids) - 1)
        assert_chosen(path, after, len(ids) - 1, more)
        again, whole = await run(engine, after[:-1], 0)
        assert_chosen(path, again, 0, whole)
        assert (await run(engine, asked[0], None))[1] == b""
        held = await run(engine, asked[1], len(asked[1]))
        assert_chosen(path, held[0], len(asked[1]), held[1])


@pytest.mark.asyncio
async def test_rows_move_and_continue_with_their_experts(model_dir: ModelDir) -> None:
    """A long prompt is read in chunks, rows change places, and a pause does not lose any."""
    path = model_dir("qwen3_moe")
    asked = [prompt * 6 for prompt in prompts(5)]
    async with serving(path, max_num_seqs=3, prefix_cache_bytes=0) as engine:
        engine._core._scheduler.max_step_tokens = 16
        calls = [asyncio.create_task(run(engine, prompt, 3)) for prompt in asked]
        for _ in range(3):
            await engine.pause(InFlightPolicy.CONTINUE)
            await engine.resume()
        for ids, routed in await asyncio.gather(*calls):
            assert_chosen(path, ids, 3, routed)


@pytest.mark.asyncio
async def test_a_dense_model_reports_none(model_dir: ModelDir) -> None:
    async with serving(model_dir("qwen2")) as engine:
        assert not engine.info.capabilities.routed_experts
