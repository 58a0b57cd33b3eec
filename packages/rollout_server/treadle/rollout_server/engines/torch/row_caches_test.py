"""Models that run row by row, against transformers."""

import asyncio
from typing import Any

import pytest
import torch
import transformers

from treadle.rollout_server.engine import ElementType, InFlightPolicy, Sampling
from treadle.rollout_server.engines.torch.model import CachedModel, ModelSource
from treadle.rollout_server.engines.torch.row_caches import check, limit_time_steps
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


@torch.no_grad()
def test_mamba_layers_keep_their_limits_where_they_read_one_id() -> None:
    """A trained model may have shorter time steps than `time_step_min`, which a new one has not."""
    untyped: Any = transformers
    torch.manual_seed(0)
    config = untyped.NemotronHConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        layers_block_type=["mamba", "attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=1,
        time_step_min=0.1,
    )
    model = untyped.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        parameter.fill_(-9.0) if name.endswith("dt_bias") else parameter.mul_(3)
    with pytest.raises(ValueError, match="depend on how many ids are read at once"):
        check(model, "nemotron_h")
    limit_time_steps(model)
    check(model, "nemotron_h")
