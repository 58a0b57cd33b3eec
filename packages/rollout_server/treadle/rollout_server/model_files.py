"""Reads a Hugging Face model directory without transformers.

An engine without torch can so describe a model, and a server can name its tokenizer.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.rollout_server.engine import ModelInfo, TensorSpec
from treadle.rollout_server.safetensors_file import read_header

_EXPERTS_KEY = re.compile(r"(\w+_)?(n|num)_((local|routed)_)?experts")
"""Names that families have for the number of a layer's experts."""


def tokenizer_sha256(directory: Path) -> bytes:
    """Returns the SHA-256 of ``tokenizer.json``; empty when there is none."""
    path = directory / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b""


def read_model(directory: Path, *, context_length: int | None = None) -> ModelInfo:
    """Returns what ``config.json`` says of a model.

    Args:
        directory: Holds ``config.json``; the end-of-sequence ids of
            ``generation_config.json`` take precedence.
        context_length: Shortens the model's own; None keeps it.

    Raises:
        OSError: There is no ``config.json``.
        ValueError: It lacks a needed key, or `context_length` is longer than the model's.
    """
    config = json.loads((directory / "config.json").read_text())
    architectures = config.get("architectures") or [""]
    config |= config.get("text_config") or {}  # Of a vision model.
    missing = [key for key in ("vocab_size", "max_position_embeddings") if key not in config]
    if missing:
        raise ValueError(f"{directory / 'config.json'} lacks {', '.join(missing)}")
    generation_path = directory / "generation_config.json"
    generation = json.loads(generation_path.read_text()) if generation_path.is_file() else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    longest = int(config["max_position_embeddings"])
    if context_length is not None and context_length > longest:
        raise ValueError(
            f"model.context_length is {context_length}, the model in {directory} has {longest}"
        )
    return ModelInfo(
        architecture=str(architectures[0]),
        vocab_size=int(config["vocab_size"]),
        context_length=context_length or longest,
        eos_token_ids=frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos),
        tokenizer_sha256=tokenizer_sha256(directory),
        **_experts(config),
    )


def has_experts(directory: Path) -> bool:
    """Returns whether a model of any family has routed experts, by its ``config.json``.

    Raises:
        OSError: There is no ``config.json``.
    """
    return _counts_experts(json.loads((directory / "config.json").read_text()))


def _counts_experts(config: Mapping[str, Any]) -> bool:
    for key, value in config.items():
        if isinstance(value, dict):  # Of the text model of a vision model, or of its layers.
            if _counts_experts(value):
                return True
        elif _EXPERTS_KEY.fullmatch(key):  # A list has a number for each layer.
            numbers = value if isinstance(value, list) else [value]
            if any(isinstance(number, int) and number > 0 for number in numbers):
                return True
    return False


def _experts(config: Mapping[str, Any]) -> dict[str, int]:
    """Returns the fields of a model with experts, for families whose layers we know."""
    if config.get("model_type") != "qwen3_moe":
        return {}
    dense, step = set(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step", 1)
    layers = range(int(config["num_hidden_layers"]))
    return {
        "num_moe_layers": sum(i not in dense and (i + 1) % step == 0 for i in layers),
        # transformers 5 writes another name than published files have.
        "num_experts": int(config.get("num_experts") or config["num_local_experts"]),
        "experts_per_token": int(config["num_experts_per_tok"]),
    }


def read_parameters(directory: Path) -> tuple[TensorSpec, ...]:
    """Returns the tensors of the directory's ``*.safetensors`` files, sorted by name.

    Raises:
        ValueError: There is no such file, or one is malformed.
    """
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{directory} holds no *.safetensors file")
    specs = [stored.spec for path in paths for stored in read_header(path)]
    return tuple(sorted(specs, key=lambda spec: spec.name))
