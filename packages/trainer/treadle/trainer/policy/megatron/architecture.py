"""A model's architecture: the settings of a Hugging Face config that decide shapes and arithmetic.

`MODEL_TYPES` says for each model type which variant of each block it has, and what its files call
the weights. `Architecture` adds the sizes and settings of one config.

Invariant: an `Architecture` can be built exactly. A config that asks for something our Megatron
model does not compute is rejected when it is read, with the setting and its value; none is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from treadle.trainer.policy.megatron.experts.shape import ExpertShape

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """What the blocks of one model type are; the defaults are Llama's.

    Attributes:
        qkv_bias: Whether queries, keys and values have biases.
        qk_norm: Whether queries and keys are normed, each head by itself.
        experts: Whether some feed-forward parts are mixtures of experts, see `experts.shape`.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False


# docs/models.md has both tables for users.
MODEL_TYPES: Final[Mapping[str, Blocks]] = MappingProxyType(
    {
        "llama": Blocks(),
        "qwen2": Blocks(qkv_bias=True),
        "qwen3": Blocks(qk_norm=True),
        "qwen3_moe": Blocks(qk_norm=True, experts=True),
    }
)
"""The model types that can be trained."""

ACCEPTED: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "hidden_act": ("silu",),
        "rope_parameters.rope_type": ("default",),
        "attention_dropout": (0.0,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
    }
)
"""Settings of a config, with the values that can be built; a setting left out has one of them."""


VOCAB_MULTIPLE: Final = 128
"""The vocabulary is padded to a multiple of this, so that its padded size, which a checkpoint
records, is the same for every tensor-parallel size that divides it."""


def padded_vocab(vocab_size: int, tensor: int) -> int:
    """Returns the rows of the embedding over all tensor-parallel ranks."""
    multiple = VOCAB_MULTIPLE if VOCAB_MULTIPLE % tensor == 0 else VOCAB_MULTIPLE * tensor
    return -(-vocab_size // multiple) * multiple


class UnsupportedModelError(ValueError):
    """The model needs something that the Megatron backend does not compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes and variants of a decoder with rotary positions and gated SiLU."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied: bool
    """The output layer is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    experts: ExpertShape | None = None
    """None: the model is dense."""

    @classmethod
    def from_folder(cls, folder: Path) -> Architecture:
        """Reads `config.json` of a Hugging Face model folder.

        Raises:
            FileNotFoundError: config.json is missing.
            UnsupportedModelError: see the class.
        """
        from transformers import AutoConfig

        file = folder / "config.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"{folder} has no config.json; expected a Hugging Face model folder"
            )
        # Before transformers reads it, which knows fewer types than there are.
        _check_type(json.loads(file.read_text(encoding="utf-8")).get("model_type"))
        return cls.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> Architecture:
        """Translate a transformers config; raises `UnsupportedModelError`."""
        _check_type(config.model_type)
        _refuse_unsupported(config)
        blocks = MODEL_TYPES[config.model_type]
        head_dim = getattr(config, "head_dim", None)
        return cls(
            model_type=config.model_type,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            ffn_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim or config.hidden_size // config.num_attention_heads,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            norm_eps=config.rms_norm_eps,
            rope_theta=float(config.rope_parameters["rope_theta"]),
            tied=bool(config.tie_word_embeddings),
            qkv_bias=blocks.qkv_bias,
            qk_norm=blocks.qk_norm,
            experts=ExpertShape.from_config(config) if blocks.experts else None,
        )

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied output layer counts once."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (heads + kv_heads)
        attention += (heads + 2 * kv_heads) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        norms = 2 * self.hidden_size
        dense = 3 * self.hidden_size * self.ffn_size
        layers = self.num_layers * (attention + dense + norms)
        if self.experts is not None:
            sparse = self.experts.num_parameters(self.hidden_size)
            layers += len(self.experts.layers) * (sparse - dense)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return embeddings + layers + self.hidden_size

    @property
    def matrices(self) -> Mapping[str, tuple[int, int]]:
        """(inputs, outputs) of each matrix of a layer, by its Hugging Face name."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden_size, heads),
            "k_proj": (self.hidden_size, kv_heads),
            "v_proj": (self.hidden_size, kv_heads),
            "o_proj": (heads, self.hidden_size),
            "gate_proj": (self.hidden_size, self.ffn_size),
            "up_proj": (self.hidden_size, self.ffn_size),
            "down_proj": (self.ffn_size, self.hidden_size),
        }

    def check_parallel(self, *, tensor: int, pipeline: int) -> None:
        """Raises `UnsupportedModelError` if the model cannot be split into this number of parts."""
        for what, size, parts, setting in (
            ("attention heads", self.num_heads, tensor, "tensor"),
            ("key-value heads", self.num_kv_heads, tensor, "tensor"),
            ("feed-forward columns", self.ffn_size, tensor, "tensor"),
            ("layers", self.num_layers, pipeline, "pipeline"),
        ):
            if size % parts:
                raise UnsupportedModelError(
                    f"policy.parallel.{setting}={parts} does not divide the model's {size} {what}"
                )


def _check_type(model_type: object) -> None:
    if model_type not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"model type {model_type!r} is not supported by the Megatron backend; supported: "
            f"{', '.join(MODEL_TYPES)}"
        )


def _refuse_unsupported(config: PretrainedConfig) -> None:
    for name, accepted in ACCEPTED.items():
        section, _, key = name.rpartition(".")
        holder = getattr(config, section) if section else vars(config)
        value = holder.get(key, accepted[0])
        if value not in accepted:
            raise UnsupportedModelError(
                f"{config.model_type} with {name}={value!r} is not supported by the Megatron "
                f"backend, which computes {' or '.join(f'{name}={a!r}' for a in accepted)} only"
            )
