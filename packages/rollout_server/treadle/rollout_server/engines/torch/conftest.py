"""Tiny models with random weights, written once a session."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

EOS = 3
VOCAB_SIZE = 61
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": EOS,
    "bos_token_id": 1,
    "initializer_range": 0.3,  # Large enough for logits that differ.
}
_MODELS: Any = AutoModelForCausalLM
_CONFIGS = {
    "qwen2": lambda: Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=False),
    "llama": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=False),
}

ModelDir = Callable[..., Path]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    """``model_dir("qwen2", seed=1)`` -> a directory that `from_pretrained` reads."""
    made: dict[tuple[str, int], Path] = {}

    def make(architecture: str = "qwen2", seed: int = 0) -> Path:
        key = (architecture, seed)
        if key not in made:
            torch.manual_seed(seed)
            model: Any = _MODELS.from_config(_CONFIGS[architecture]())
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # Zero by default, which would hide a missing one.
                    torch.nn.init.normal_(parameter, std=0.3)
            made[key] = tmp_path_factory.mktemp(f"{architecture}-{seed}")
            model.save_pretrained(made[key])
        return made[key]

    return make
