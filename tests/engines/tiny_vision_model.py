"""Tiny random vision models, in sizes that all engines support.

A head has 32 elements, the minimum of vLLM's attention on a CPU. Patches have the size of the
published models, the only one that SGLang takes. A window of Qwen2.5-VL holds 2 by 2 placeholders,
so images have several windows, and layers with and without windows differ. Biases are not zero,
because zeros would hide a missing bias.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from treadle.rollout_server.engine import PromptImage
from treadle.rollout_server.engines.torch.testing.vision_model import picture

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
PATCH_SIZE = {"qwen2_5_vl": 14, "qwen3_vl": 16}
PLACEHOLDER, VISION_START, VISION_END = 250, 248, 249
VOCAB_SIZE = 256

_CONFIGS: Any = AutoConfig
_MODELS: Any = AutoModelForImageTextToText
_STD = 0.1
_ROPE: dict[str, dict[str, Any]] = {"qwen2_5_vl": {}, "qwen3_vl": {"mrope_interleaved": True}}
_VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"fullatt_block_indexes": [1], "window_size": 56},
    "qwen3_vl": {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
}


def write_tiny_vision_model(directory: Path, family: str, *, seed: int) -> Path:
    """Writes config.json, model.safetensors (float32) and the image processor of a model."""
    patch_size = PATCH_SIZE[family]
    config = _CONFIGS.for_model(
        family,
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "bos_token_id": 1,
            "eos_token_id": 3,
            "initializer_range": _STD,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 6, 6],
                **_ROPE[family],
            },
        },
        vision_config={
            "depth": 2,
            "num_heads": 2,
            "hidden_size": 64,
            "out_hidden_size": 128,
            "intermediate_size": 96,
            "patch_size": patch_size,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "initializer_range": _STD,
            **_VISION[family],
        },
        image_token_id=PLACEHOLDER,
        video_token_id=251,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    torch.manual_seed(seed)
    model = _MODELS.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=_STD)
    model.save_pretrained(directory)
    processor: Any = Qwen2VLImageProcessorPil(
        patch_size=patch_size, size={"shortest_edge": 4 * 32**2, "longest_edge": 64 * 32**2}
    )
    processor.save_pretrained(directory)
    return directory


def shown(
    family: str, parts: list[int | tuple[int, int, int]]
) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
    """Returns a prompt and its images, of ids and of images as (columns, rows, seed) of ids."""
    side = 2 * PATCH_SIZE[family]
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        columns, rows, seed = part
        data = picture(columns * side, rows * side, seed=seed)
        count, start = columns * rows, len(ids) + 1
        ids += [VISION_START, *[PLACEHOLDER] * count, VISION_END]
        images.append(PromptImage(data=data, media_type="image/png", start=start, num_tokens=count))
    return tuple(ids), tuple(images)
