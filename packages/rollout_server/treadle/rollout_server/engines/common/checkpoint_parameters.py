"""The checkpoint tensors that an engine needs to load a model.

Invariant: names and shapes are those of the model's ``*.safetensors``, without tensors that are
not independent weights: a head that is tied to the embedding, and tables computed from the
configuration. Engines fuse and pack them; `load_weights` takes them as published.
"""

import dataclasses
import json
from pathlib import Path

from treadle.rollout_server.engine import ElementType, TensorSpec
from treadle.rollout_server.model_files import read_parameters

_HEAD = "lm_head.weight"
_COMPUTED = ("rotary_emb.inv_freq",)


def checkpoint_parameters(directory: Path, dtype: str) -> tuple[TensorSpec, ...]:
    """Returns the tensors that `Engine.load_weights` must receive.

    Args:
        dtype: Element type of the weights in the engine.

    Raises:
        ValueError: There is no safetensors file, or one is malformed.
    """
    config = json.loads((directory / "config.json").read_text())
    text = config | (config.get("text_config") or {})
    # Without the key, a head in the files is not tied.
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return tuple(
        dataclasses.replace(spec, element_type=ElementType(dtype))
        for spec in read_parameters(directory)
        if not spec.name.endswith(_COMPUTED) and not (tied and spec.name == _HEAD)
    )
