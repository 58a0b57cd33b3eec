"""Tiny models with random weights, written once a session, and their weights as tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from treadle.rollout_server.engine import ElementType, NamedTensor, TensorSpec

EOS = 3
VOCAB_SIZE = 61
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": EOS,
    "bos_token_id": 1,
    "initializer_range": 0.3,  # Large enough for logits that differ.
}
_MODELS: Any = AutoModelForCausalLM
_CONFIGS: dict[str, Any] = {
    "qwen2": lambda: Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=False),
    "llama": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=False),
}

ModelDir = Callable[..., Path]


def named_tensors(path: Path, **changes: torch.Tensor | None) -> list[NamedTensor]:
    """The weights in a directory, some replaced or (None) left out."""
    tensors: dict[str, torch.Tensor | None] = {**load_file(path / "model.safetensors"), **changes}
    return [
        NamedTensor(
            spec=TensorSpec(name=name, element_type=ElementType.FLOAT32, shape=tuple(tensor.shape)),
            data=memoryview(bytearray(tensor.numpy().tobytes())),
        )
        for name, tensor in tensors.items()
        if tensor is not None
    ]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    """``model_dir("qwen2", seed=1)`` -> a directory that `from_pretrained` reads."""
    made: dict[tuple[str, int], Path] = {}

    def make(architecture: str = "qwen2", seed: int = 0) -> Path:
        key = (architecture, seed)
        if key not in made:
            torch.manual_seed(seed)
            model = _MODELS.from_config(_CONFIGS[architecture]())
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # Zero by default, which would hide a missing one.
                    torch.nn.init.normal_(parameter, std=0.3)
            made[key] = tmp_path_factory.mktemp(f"{architecture}-{seed}")
            model.save_pretrained(made[key])
        return made[key]

    return make
