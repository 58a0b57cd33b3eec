"""The torch engine with a tiny Qwen3-VL, whose tower adds to the first layers too."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from treadle.conformance.contracts.reference import VisionReference
from treadle.rollout_server.engine import InFlightPolicy, Sampling
from treadle.rollout_server.engines.torch import core
from treadle.rollout_server.engines.torch.testing.text_model import (
    collected,
    request,
    serving,
    weights_of,
)
from treadle.rollout_server.engines.torch.testing.vision_model import (
    EOS,
    PLACEHOLDER,
    VOCAB_SIZE,
    picture,
    placed,
)

SAMPLED = Sampling(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
WIDE, TALL = picture(48, 16, seed=1), picture(24, 40, seed=2)
CONVERSATIONS: dict[str, list[int | bytes]] = {
    "text": [5, 6, 7, 8],
    "one": [5, 6, 58, WIDE, 57, 8, 9],
    "three": [5, 58, WIDE, 57, 6, 7, 58, TALL, 57, 8, 58, WIDE, 57, 9],
}


def write_model(directory: Path, seed: int) -> None:
    torch.manual_seed(seed)
    config: Any = Qwen3VLConfig(
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 1024,
            "eos_token_id": EOS,
            "initializer_range": 0.3,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 4,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
            "initializer_range": 0.3,
        },
        image_token_id=PLACEHOLDER,
        video_token_id=59,
        vision_start_token_id=58,
        vision_end_token_id=57,
    )
    model: Any = Qwen3VLForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # Zero by default, which would hide a missing bias.
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    processor: Any = Qwen2VLImageProcessorPil(
        patch_size=4, size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    )
    processor.save_pretrained(directory)


async def check(engine: Any, reference: VisionReference, parts: Sequence[int | bytes]) -> None:
    ids, images = placed(parts)
    wanted = request(ids, SAMPLED, images=images)
    output = collected([event async for event in engine.generate(wanted)])
    expected = reference.logprobs(ids, images, output.ids)
    assert output.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.asyncio
@pytest.mark.parametrize("step_tokens", [256, 5])
async def test_logprobs_are_those_of_transformers_also_after_an_update(
    tmp_path: Path, step_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images in one step or in parts; then the weights of another model, its tower included."""
    for seed in (0, 1):
        write_model(tmp_path / str(seed), seed)
    monkeypatch.setattr(core, "_STEP_TOKENS", step_tokens)
    async with serving(tmp_path / "0") as engine:
        for parts in CONVERSATIONS.values():
            await check(engine, VisionReference(tmp_path / "0"), parts)
        await engine.pause(InFlightPolicy.DRAIN)
        await engine.load_weights(weights_of(tmp_path / "1"), version=2)
        await engine.resume()
        await check(engine, VisionReference(tmp_path / "1"), CONVERSATIONS["three"])
