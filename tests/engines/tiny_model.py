"""A tiny random Qwen2 with a tied output head, in sizes that all engines support.

A head has 32 elements, the minimum of vLLM's attention on a CPU. The weights have enough variance
for distinct logits. Biases are not zero, because zeros would hide a missing bias.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

_MODELS: Any = AutoModelForCausalLM
_STD = 0.1


def write_tiny_model(directory: Path, *, seed: int) -> Path:
    """Writes config.json and model.safetensors (float32, half a million parameters)."""
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=3,
        initializer_range=_STD,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = _MODELS.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=_STD)
    model.save_pretrained(directory)
    return directory
