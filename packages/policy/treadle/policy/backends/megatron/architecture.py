"""A model's architecture: the settings of a Hugging Face config that decide shapes and arithmetic.

`MODEL_TYPES` says for each model type which variant of each block it has, and what its files call
the weights. `Architecture` adds the sizes and settings of one config.

Invariant: an `Architecture` can be built exactly. A config that asks for something our Megatron
model does not compute is rejected when it is read, with the setting and its value; none is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from treadle.policy.backends.description import (
    ModelShape,
    UnsupportedModelError,
    adapted_names,
    refuse_quantised,
)
from treadle.policy.backends.megatron.experts.shape import ExpertShape
from treadle.policy.backends.vision.shape import VisionShape, check_reference

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from treadle.policy.client.types import SharePrefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """The files' names of a layer's norms: before and after attention and feed-forward part.

    Attributes:
        after_attention: Norm of the attention's output, before it is added; None: there is none.
        after_mlp: Norm of the feed-forward output, before it is added; None: there is none.
    """

    before_attention: str = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str | None = None

    @property
    def num(self) -> int:
        """Number of norms of a layer."""
        return 2 + (self.after_attention is not None) + (self.after_mlp is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The form of the blocks of one model type; the defaults are Llama's.

    Attributes:
        one_plus_norms: Whether a norm multiplies by 1 + weight, in float32, and not by the weight.
        qkv_bias: Whether queries, keys and values have biases; None: `attention_bias` decides.
        qk_norm: Whether queries and keys are normed, each head alone.
        experts: Whether some feed-forward parts are mixtures of experts, see `experts.shape`.
        fused_qkv: Whether the files have queries, keys and values in one matrix, `qkv_proj`.
        fused_gate_up: Whether they have gate and up in one matrix, `gate_up_proj`.
        interleaved: Whether rotary positions turn neighbouring dimensions of a head, and not those
            of its two halves.
        windows: Which layers have a sliding window, if `sliding_window` is set: those that
            `layer_types` names, all, or none as the setting has no meaning.
        scaled_embeddings: Whether embeddings are multiplied by the root of the hidden size.
        reads: Which of the settings `query_pre_attn_scalar`, `attn_logit_softcapping` and
            `final_logit_softcapping` it has; the others have no meaning.
    """

    norms: Norms = Norms()
    one_plus_norms: bool = False
    qkv_bias: bool | None = False
    qk_norm: bool = False
    experts: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    interleaved: bool = False
    windows: Literal["layer_types", "all", "none"] = "none"
    scaled_embeddings: bool = False
    reads: tuple[str, ...] = ()

    @property
    def fused(self) -> Mapping[str, tuple[str, ...]]:
        """The parts of each matrix that the files have in place of several."""
        qkv = {"qkv_proj": ("q_proj", "k_proj", "v_proj")} if self.fused_qkv else {}
        return qkv | ({"gate_up_proj": ("gate_proj", "up_proj")} if self.fused_gate_up else {})


_GEMMA_NORMS: Final = Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_GLM4_NORMS: Final = Norms(
    after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"
)

# docs/models.md has these tables for users.
MODEL_TYPES: Final[Mapping[str, Blocks]] = MappingProxyType(
    {
        "llama": Blocks(),
        "mistral": Blocks(windows="all"),
        "qwen2": Blocks(qkv_bias=True, windows="layer_types"),
        "qwen3": Blocks(qk_norm=True, windows="layer_types"),
        "qwen3_moe": Blocks(qk_norm=True, experts=True, windows="all"),
        "phi3": Blocks(fused_qkv=True, fused_gate_up=True, windows="all"),
        "glm": Blocks(qkv_bias=None, fused_gate_up=True, interleaved=True),
        "glm4": Blocks(qkv_bias=None, fused_gate_up=True, interleaved=True, norms=_GLM4_NORMS),
        "gemma": Blocks(one_plus_norms=True, scaled_embeddings=True),
        "gemma2": Blocks(
            norms=_GEMMA_NORMS,
            one_plus_norms=True,
            windows="layer_types",
            scaled_embeddings=True,
            reads=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
        ),
        "gemma3_text": Blocks(
            norms=_GEMMA_NORMS,
            one_plus_norms=True,
            qk_norm=True,
            windows="layer_types",
            scaled_embeddings=True,
            reads=("query_pre_attn_scalar", "final_logit_softcapping"),
        ),
        # Their language models; `vision.shape` has the towers.
        "qwen2_5_vl": Blocks(qkv_bias=True, windows="layer_types"),
        "qwen3_vl": Blocks(qk_norm=True),
    }
)
"""The model types that can be trained."""

_DELTA_NET: Final = (
    "it has gated delta net layers: Megatron-core computes those of packed sequences only from "
    "0.18 on, with flash-linear-attention, on a GPU"
)
REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "qwen3_next": _DELTA_NET,
        "qwen3_5": _DELTA_NET,
        "qwen3_5_text": _DELTA_NET,
        "qwen3_5_moe": _DELTA_NET,
        "qwen3_5_moe_text": _DELTA_NET,
        "gpt_oss": "its attention has sinks, and its experts have biases and clamped activations",
        "gemma3": "its vision tower is not computed; the sizes that read text only are gemma3_text",
        "qwen3_vl_moe": "experts are computed in models that read text only",
        "olmo2": "it norms queries and keys over all heads, which tensor-parallel ranks share",
    }
)
"""Model types that one may ask for, and what of them is not computed."""

ACCEPTED: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "hidden_act": ("silu", "gelu_pytorch_tanh"),
        "hidden_activation": ("gelu_pytorch_tanh", "silu"),
        "rope_parameters.rope_type": ("default", "linear", "llama3", "yarn"),
        "attention_dropout": (0.0,),
        "resid_pdrop": (0.0,),
        "embd_pdrop": (0.0,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_bidirectional_attention": (False,),
    }
)
"""Settings of a config, with the values that can be built; a setting left out, or null, has one of
them. `attention_bias` may be true too where it means biases of queries, keys and values only."""


VOCAB_MULTIPLE: Final = 128
"""The vocabulary is padded to a multiple of this, so that its padded size, which a checkpoint
records, is the same for every tensor-parallel size that divides it."""


def padded_vocab(vocab_size: int, tensor: int) -> int:
    """Returns the rows of the embedding over all tensor-parallel ranks."""
    multiple = VOCAB_MULTIPLE if VOCAB_MULTIPLE % tensor == 0 else VOCAB_MULTIPLE * tensor
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture(ModelShape):
    """Sizes and settings of a decoder with rotary positions and gated feed-forward parts.

    Attributes:
        experts: Sizes of the layers with experts; None: the model is dense.
        rope_theta: Base of the rotary frequencies.
        rope_local_theta: The same for layers with a window, if theirs differ; those are not scaled.
        rope_share: Share of a head's dimensions that rotary positions turn.
        rope_scaling: `rope_parameters` of another `rope_type` than default, but for theta and
            share, sorted.
        windows: Rows that a row sees, itself included, by layer; None: all before it. Empty: no
            layer has a window.
        score_scale: Factor of attention scores; None: 1 / sqrt(head_dim).
        score_softcap: c of c tanh(score / c); None: scores are not capped.
        logit_softcap: The same of the logits.
        vision: The tower of a model that sees; None: it reads text only.
    """

    ffn_size: int
    rope_theta: float
    qkv_bias: bool
    qk_norm: bool
    experts: ExpertShape | None = None
    activation: str = "silu"
    rope_local_theta: float | None = None
    rope_share: float = 1.0
    rope_scaling: tuple[tuple[str, float | str | bool], ...] = ()
    windows: tuple[int | None, ...] = ()
    score_scale: float | None = None
    score_softcap: float | None = None
    logit_softcap: float | None = None
    vision: VisionShape | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> Architecture:
        """Reads `config.json` of a Hugging Face model folder.

        Raises:
            FileNotFoundError: config.json is missing.
            UnsupportedModelError: See the class.
        """
        from transformers import AutoConfig

        file = folder / "config.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"{folder} has no config.json; expected a Hugging Face model folder"
            )
        # Before transformers reads it, which knows fewer types than there are.
        _check_type(json.loads(file.read_text(encoding="utf-8")).get("model_type"))
        refuse_quantised(folder)
        return cls.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> Architecture:
        """Translate a transformers config; raises `UnsupportedModelError`."""
        _check_type(config.model_type)
        whole, config = config, config.get_text_config()
        _refuse_unsupported(config, whole.model_type)
        blocks = MODEL_TYPES[whole.model_type]
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        rope, local = _rope_parameters(config)
        bias = config.attention_bias if blocks.qkv_bias is None else blocks.qkv_bias
        read = {name: getattr(config, name) for name in blocks.reads}
        query_scalar = read.get("query_pre_attn_scalar")
        return cls(
            model_type=whole.model_type,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            ffn_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            norm_eps=config.rms_norm_eps,
            rope_theta=float(rope["rope_theta"]),
            tied=bool(whole.tie_word_embeddings),
            qkv_bias=bool(bias),
            qk_norm=blocks.qk_norm,
            experts=ExpertShape.from_config(config) if blocks.experts else None,
            activation=getattr(config, "hidden_activation", None) or config.hidden_act,
            rope_local_theta=None if local is None else float(local["rope_theta"]),
            rope_share=float(rope.get("partial_rotary_factor") or 1.0),
            rope_scaling=_rope_scaling(rope),
            windows=_windows(config, blocks),
            score_scale=None if query_scalar is None else query_scalar**-0.5,
            score_softcap=read.get("attn_logit_softcapping"),
            logit_softcap=read.get("final_logit_softcapping"),
            vision=VisionShape.from_config(whole),
        )

    @property
    def blocks(self) -> Blocks:
        """The form of the blocks of its model type."""
        return MODEL_TYPES[self.model_type]

    @property
    def attention_is_plain(self) -> bool:
        """Whether each row sees all rows before it, by scores that are not capped."""
        return self.score_softcap is None and not self.windows

    def window(self, layer: int) -> int | None:
        """Returns the number of rows that a row sees in a layer, from 0 on; None: all before it."""
        return self.windows[layer] if self.windows else None

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied output layer counts once."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (heads + kv_heads)
        attention += (heads + 2 * kv_heads) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        norms = self.blocks.norms.num * self.hidden_size
        dense = 3 * self.hidden_size * self.ffn_size
        layers = self.num_layers * (attention + dense + norms)
        if self.experts is not None:
            sparse = self.experts.num_parameters(self.hidden_size)
            layers += len(self.experts.layers) * (sparse - dense)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        tower = 0 if self.vision is None else self.vision.num_parameters
        return embeddings + layers + self.hidden_size + tower

    @property
    def matrices(self) -> Mapping[str, tuple[int, int]]:
        """(inputs, outputs) of each matrix of a layer, by its Hugging Face name."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = {
            "q_proj": (self.hidden_size, heads),
            "k_proj": (self.hidden_size, kv_heads),
            "v_proj": (self.hidden_size, kv_heads),
            "o_proj": (heads, self.hidden_size),
            "gate_proj": (self.hidden_size, self.ffn_size),
            "up_proj": (self.hidden_size, self.ffn_size),
            "down_proj": (self.ffn_size, self.hidden_size),
        }
        for name, parts in self.blocks.fused.items():
            sizes[name] = (self.hidden_size, sum(sizes.pop(part)[1] for part in parts))
        return sizes

    def adapted(self, targets: Sequence[str]) -> tuple[str, ...]:
        """See `adapted_names`."""
        return adapted_names(targets, self.blocks.fused, self.model_type)

    def check_sharing(self, mode: SharePrefixes) -> None:
        """Raises `UnsupportedModelError` if prefixes are to be shared always, but cannot be."""
        if mode == "always" and not self.attention_is_plain:
            raise UnsupportedModelError(
                f"policy.share_prefixes=always: {self._not_plain}, for which prefixes are not "
                "shared; take auto, which shares none here"
            )

    def check_context(self, context: int) -> None:
        """Raises `UnsupportedModelError` if rows cannot be spread over context ranks."""
        if context > 1 and not self.attention_is_plain:
            raise UnsupportedModelError(
                f"policy.parallel.context={context}: {self._not_plain}, which is not computed over "
                "several context ranks; set it to 1"
            )

    def check_reference(self, reference: Architecture) -> None:
        """Raises `UnsupportedModelError` if a model cannot score what this one has seen."""
        check_reference(self.model_type, self.vision, reference.model_type, reference.vision)

    @property
    def _not_plain(self) -> str:
        what = "layers with a sliding window" if self.windows else "capped attention scores"
        return f"{self.model_type} has {what}"

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
        deepstack = 0 if self.vision is None else self.vision.deepstack
        if deepstack > self.num_layers // pipeline:
            raise UnsupportedModelError(
                f"policy.parallel.pipeline={pipeline} leaves {self.num_layers // pipeline} layers "
                f"on the first stage, and the vision tower adds to the first {deepstack}, which "
                "must be on its stage: take fewer stages"
            )


def _check_type(model_type: object) -> None:
    if model_type not in MODEL_TYPES:
        reason = REFUSED.get(str(model_type))
        why = f": {reason}" if reason else ""
        raise UnsupportedModelError(
            f"model type {model_type!r} is not supported by the Megatron backend{why}; supported: "
            f"{', '.join(MODEL_TYPES)}"
        )


def _refuse_unsupported(config: PretrainedConfig, model_type: str) -> None:
    for name, accepted in ACCEPTED.items():
        section, _, key = name.rpartition(".")
        if name == "attention_bias" and MODEL_TYPES[model_type].qkv_bias is None:
            continue
        holder = _rope_parameters(config)[0] if section else vars(config)
        value = holder.get(key)
        if value is not None and value not in accepted:
            raise UnsupportedModelError(
                f"{model_type} with {name}={value!r} is not supported by the Megatron "
                f"backend, which computes {' or '.join(f'{name}={a!r}' for a in accepted)} only"
            )


def _rope_parameters(
    config: PretrainedConfig,
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Returns those of layers that see all rows, and those of layers with a window if they differ.

    Raises:
        UnsupportedModelError: Those of layers with a window are scaled.
    """
    parameters: Mapping[str, Any] = config.rope_parameters
    if "full_attention" not in parameters:
        return parameters, None
    local = parameters["sliding_attention"]
    if local["rope_type"] != "default":
        raise UnsupportedModelError(
            f"{config.model_type} with rope_parameters.sliding_attention.rope_type="
            f"{local['rope_type']!r} is not supported by the Megatron backend, which computes "
            "'default' only in layers with a window"
        )
    return parameters["full_attention"], local


def _rope_scaling(parameters: Mapping[str, Any]) -> tuple[tuple[str, float | str | bool], ...]:
    if parameters["rope_type"] == "default":
        return ()
    # "type" is an older name of "rope_type".
    # The sections are in `vision`.
    besides = (
        *("rope_theta", "partial_rotary_factor", "type"),
        *("mrope_section", "mrope_interleaved"),
    )
    return tuple(
        sorted((k, v) for k, v in parameters.items() if k not in besides and v is not None)
    )


def _windows(config: PretrainedConfig, blocks: Blocks) -> tuple[int | None, ...]:
    """Returns the window of each layer; nothing if no layer has one."""
    window: int | None = None if blocks.windows == "none" else config.sliding_window
    if window is None:
        return ()
    if blocks.windows == "all":
        return (window,) * int(config.num_hidden_layers)
    kinds: dict[str, int | None] = {"sliding_attention": window, "full_attention": None}
    if unknown := sorted(set(config.layer_types) - kinds.keys()):
        raise UnsupportedModelError(
            f"{config.model_type} with layer_types {', '.join(unknown)} is not supported by the "
            f"Megatron backend, which computes {' and '.join(kinds)} only"
        )
    windows: tuple[int | None, ...] = tuple(kinds[kind] for kind in config.layer_types)
    return windows if any(windows) else ()
