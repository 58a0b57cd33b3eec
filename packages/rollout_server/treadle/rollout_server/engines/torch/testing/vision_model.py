"""A tiny vision model, and images."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from treadle.rollout_server.engine import PromptImage

PLACEHOLDER, EOS, VOCAB_SIZE = 60, 3, 64


def write_vision_model(
    directory: Path,
    seed: int,
    *,
    patch_size: int = 4,
    vocab_size: int = VOCAB_SIZE,
    placeholder_id: int = PLACEHOLDER,
) -> None:
    """Writes a tiny Qwen2.5-VL with random weights and its image processor.

    Only a `patch_size` of 4 fits the model. A placeholder stands for 8 by 8 pixels. A vision
    window holds 2 by 2 of them, so images have several windows, and layers with and without
    windows differ.
    """
    torch.manual_seed(seed)
    config: Any = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocab_size,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "eos_token_id": EOS,
            "bos_token_id": 1,
            "initializer_range": 0.3,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 2],
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
            "window_size": 16,
            "patch_size": 4,
            "initializer_range": 0.3,
        },
        image_token_id=placeholder_id,
        video_token_id=59,
        vision_start_token_id=58,
        vision_end_token_id=57,
    )
    model: Any = Qwen2_5_VLForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # Zero by default, which would hide a missing bias.
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    processor: Any = Qwen2VLImageProcessorPil(
        patch_size=patch_size, size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    )
    processor.save_pretrained(directory)


def picture(width: int, height: int, *, seed: int = 0, kind: str = "PNG") -> bytes:
    """Returns an encoded image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def placed(
    prompt: Sequence[int | bytes], *, media_type: str = "image/png", merged: int = 8
) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
    """Replaces images, whose sides are multiples of `merged`, by placeholder ids."""
    ids: list[int] = []
    images = []
    for part in prompt:
        if isinstance(part, int):
            ids.append(part)
            continue
        width, height = Image.open(io.BytesIO(part)).size
        count = (width // merged) * (height // merged)
        images.append(
            PromptImage(data=part, media_type=media_type, start=len(ids), num_tokens=count)
        )
        ids += [PLACEHOLDER] * count
    return tuple(ids), tuple(images)
