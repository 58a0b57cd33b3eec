"""Models that run row by row, against transformers."""

import asyncio

import pytest
import torch

from treadle.rollout_server.engine import ElementType, InFlightPolicy, Sampling
from treadle.rollout_server.engines.torch.model import CachedModel, ModelSource
from treadle.rollout_server.engines.torch.testing.text_model import (
    ModelDir,
    complete,
    hf_greedy,
    hf_logprobs,
    prompts,
    serving,
    weights_of,
)


@pytest.mark.asyncio
async def test_rows_come_and_go_and_weights_are_replaced(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, more of them than rows; then experts and states by other weights."""
    monkeypatch.setattr("treadle.rollout_server.engines.torch.core._STEP_TOKENS", 16)
    path, other = model_dir("qwen3_next"), model_dir("qwen3_next", seed=1)
    asked = prompts(6, shared=9)
    settings = [Sampling(max_tokens=4 + 3 * i, seed=i, ignore_eos=True) for i in range(6)]
    async with serving(path, max_num_seqs=3) as engine:
        outputs = await asyncio.gather(*map(complete, [engine] * 6, asked, settings))
        await engine.pause(InFlightPolicy.DRAIN)
        await engine.load_weights(weights_of(other), version=4)
        await engine.resume()
        after = await complete(engine, asked[0])
    for prompt, output in zip(asked, outputs, strict=True):
        assert not output.cached
        want = hf_logprobs(path, prompt, output.ids)
        torch.testing.assert_close(torch.tensor(output.logprobs), want, rtol=0, atol=1e-4)
    assert after.ids == hf_greedy(other, asked[0], 12)


def test_a_model_that_cannot_read_in_parts_is_refused(model_dir: ModelDir) -> None:
    source = ModelSource(path=model_dir("bert"), dtype=ElementType.FLOAT32, device="cpu")
    with pytest.raises(ValueError, match="'bert' is not supported by the torch engine: its logits"):
        CachedModel(source)
