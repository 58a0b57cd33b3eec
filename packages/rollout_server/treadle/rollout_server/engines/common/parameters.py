"""Parameters: the checkpoint tensors that the engine must be given to hold a model.

Invariant: the names and shapes are those of the model's own ``*.safetensors``, less what is no
weight of its own: a head that is tied to the embedding, and tables computed from the
configuration. Engines fuse and pack them; `load_weights` takes them as they are published.
"""

import dataclasses
import json
from pathlib import Path

from treadle.rollout_server.engine import ElementType, TensorSpec
from treadle.rollout_server.model_files import read_parameters

_HEAD = "lm_head.weight"
_COMPUTED = ("rotary_emb.inv_freq",)


def held_parameters(directory: Path, dtype: str) -> tuple[TensorSpec, ...]:
    """What `Engine.load_weights` must be given.

    Args:
        directory: Of the model.
        dtype: In which the engine holds it.

    Raises:
        ValueError: There is no safetensors file, or one is malformed.
    """
    config = json.loads((directory / "config.json").read_text())
    text = config | (config.get("text_config") or {})
    # Where it is not said, a head in the files is a head of its own.
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return tuple(
        dataclasses.replace(spec, element_type=ElementType(dtype))
        for spec in read_parameters(directory)
        if not spec.name.endswith(_COMPUTED) and not (tied and spec.name == _HEAD)
    )
