"""The model: a Hugging Face causal LM whose attention reads our KV cache.

Invariant: the names and shapes of tensors are checked before `write`, so `write` cannot fail
and an update replaces either all weights or none.

The decoders of `_TEXT_TYPES`, with full or sliding attention by layer, and Qwen2.5-VL and Qwen3-VL
for text and images run in one flat row over our KV cache. Any other decoder runs row by row, with
the caches of transformers, if reading its ids in parts gives what reading them at once does. A
rotary embedding that depends on the sequence length is rejected at load.

Parameters have their names and shapes in published checkpoints. For Qwen2.5-VL they differ from
the module names: ``visual.blocks.0...`` and ``model.layers.0...``. For a model with experts a
module has one tensor for all of them, of which each matrix of a checkpoint
(``mlp.experts.0.gate_proj.weight``) is a part.

Everything here runs on the compute thread; nothing waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from treadle.rollout_server.engine import ElementType, NamedTensor, TensorSpec
from treadle.rollout_server.engines.common.element_types import TORCH_DTYPES
from treadle.rollout_server.engines.images.reader import ImageDecoder, PlacedImage
from treadle.rollout_server.engines.torch.activations import make_exact
from treadle.rollout_server.engines.torch.attention import (
    IMPLEMENTATION,
    RowSpan,
    StepLayout,
    cached_attention,
    least_tokens,
)
from treadle.rollout_server.engines.torch.kv_cache import KvCache, KvCacheShape
from treadle.rollout_server.engines.torch.row_caches import (
    RowCaches,
    check,
    limit_time_steps,
    stored_views,
)
from treadle.rollout_server.engines.torch.vision import ImageEncoder, VisionInputs
from treadle.rollout_server.model_files import read_model

_VISION_TYPES = ("qwen2_5_vl", "qwen3_vl")
# The types that the Megatron backend of the policy trains (docs/models.md).
_TEXT_TYPES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "phi3",
    "glm",
    "glm4",
    "gemma",
    "gemma2",
    "gemma3_text",
)
_MODEL_TYPES = (*_TEXT_TYPES, *_VISION_TYPES)
# Module prefix -> checkpoint prefix, by model type, where they differ.
_PUBLISHED = {
    "qwen2_5_vl": (("model.language_model.", "model."), ("model.visual.", "visual.")),
}
_ROPE_TYPES = ("default", "linear", "llama3", "proportional", "yarn")

_ELEMENT_TYPES = {dtype: element_type for element_type, dtype in TORCH_DTYPES.items()}

# Untyped in transformers.
_TEXT_MODEL: Any = AutoModelForCausalLM
_DEQUANTISED = ("fp8", "mxfp4")  # by transformers, with their scales
_VISION_MODEL: Any = AutoModelForImageTextToText

AttentionInterface.register(IMPLEMENTATION, cached_attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model directory and how to load it.

    Attributes:
        path: Directory with ``config.json`` and ``*.safetensors``.
        dtype: Element type of weights and KV cache.
        device: "cpu", "cuda", or "auto", which means CUDA if available.
        context_length: Maximum number of tokens; None means the model's own maximum.
        image_cache_bytes: Maximum memory for decoded images. The newest always stays.
    """

    path: Path
    dtype: ElementType
    device: str
    context_length: int | None = None
    image_cache_bytes: int = 0


class CachedModel:
    """A causal LM that reads one flat row of tokens per step.

    Attributes:
        images: Decodes the images of prompts; None for text-only models.
        row_bytes: Number of bytes of a row's routed experts; 0 for a model without experts.

    Raises:
        ValueError: The model is not supported, or the device is not available.
        OSError: The model files are missing.
    """

    def __init__(self, source: ModelSource) -> None:
        self.device = _resolve_device(source.device)
        self.dtype = TORCH_DTYPES[source.dtype]
        self.info = read_model(source.path, context_length=source.context_length)
        config: Any = AutoConfig.from_pretrained(source.path, local_files_only=True)
        text_config = config.get_text_config()
        _check_supported(config.model_type, text_config)
        quantised = getattr(config, "quantization_config", {})
        if quantised and quantised.get("quant_method") not in _DEQUANTISED:
            method = quantised.get("quant_method")
            raise ValueError(_quantised(source.path, f"quantization_config is {method}"))
        quantised["dequantize"] = True
        takes_images = config.model_type in _VISION_TYPES
        self._model, report = (_VISION_MODEL if takes_images else _TEXT_MODEL).from_pretrained(
            source.path,
            config=config,
            dtype=self.dtype,
            attn_implementation=_attention(config.model_type),
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
        if quantised.get("quant_method"):
            del self._model._weight_conversions  # names are those of whole weights
        if report["missing_keys"]:  # transformers initialises these at random.
            raise ValueError(
                f"{source.path} lacks {len(report['missing_keys'])} weights of the model, "
                f"for example {min(report['missing_keys'])!r}: copy the whole checkpoint"
            )
        # A quantised checkpoint may not say so in its config; its weights would lack their scales.
        if scales := [name for name in report["unexpected_keys"] if "scale" in name]:
            raise ValueError(_quantised(source.path, f"it has {min(scales)}"))
        self._model.requires_grad_(False).train(False).to(self.device)
        self._is_flat = config.model_type in _MODEL_TYPES
        if not self._is_flat:
            limit_time_steps(self._model)
            check(self._model, config.model_type)
        self._renamed = _PUBLISHED.get(config.model_type, ()) if takes_images else None
        self._parameters = self._published_parameters()
        self.images: ImageDecoder | None = None
        if takes_images:
            self.images = ImageDecoder(
                source.path,
                placeholder_id=config.image_token_id,
                cache_bytes=source.image_cache_bytes,
            )
            tower = self._model.get_submodule("model.visual")
            tower.register_forward_hook(_stack_features)
            self._tower = ImageEncoder(tower, self.images.processor, self.device)
        self.row_bytes = self.info.routed_row_bytes
        self._routed: list[torch.Tensor] = []
        if not self._is_flat:
            return
        routers = [m for m in self._model.modules() if type(m).__name__.endswith("TopKRouter")]
        assert len(routers) == self.info.num_moe_layers, f"{len(routers)} routers"
        for router in routers:
            router.register_forward_hook(self._capture)
        self.num_layers: int = text_config.num_hidden_layers
        self.num_kv_heads: int = text_config.num_key_value_heads
        heads: int = text_config.num_attention_heads
        self.queries_per_head: int = heads // text_config.num_key_value_heads
        self.head_dim: int = (
            getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
        )

    @property
    def parameters(self) -> tuple[TensorSpec, ...]:
        """Every parameter once; of tied weights the embedding, not the head."""
        return tuple(
            TensorSpec(
                name=name,
                element_type=_ELEMENT_TYPES[parameter.dtype],
                shape=tuple(parameter.shape),
            )
            for name, parameter in self._parameters.items()
        )

    @property
    def can_be_exact(self) -> bool:
        """Whether a cache can be exact: one of float32 on a CPU, with MKL."""
        is_known = self.device.type == "cpu" and torch.backends.mkl.is_available()
        return self._is_flat and self.dtype is torch.float32 and is_known

    @property
    def why_not_exact(self) -> str:
        """Why a token's bits depend on what else a step computes; "" if they need not."""
        if self.info.num_moe_layers:
            return "the model has experts, which read a few rows at a time"
        if not self.can_be_exact:
            return (
                "the torch engine has it in float32 on a CPU only, with MKL, for models with keys "
                "and values alone"
            )
        return ""

    def new_cache(self, *, max_rows: int, is_exact: bool = False) -> KvCache | RowCaches:
        """Returns an empty cache for this model; an exact one makes its activations exact."""
        if not self._is_flat:
            return RowCaches()
        if is_exact:
            make_exact(self._model)
        return KvCache(self.kv_shape(max_rows=max_rows, is_exact=is_exact))

    def kv_shape(self, *, max_rows: int, is_exact: bool = False) -> KvCacheShape:
        """Returns the shape of a KV cache for this model."""
        return KvCacheShape(
            num_layers=self.num_layers,
            num_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            device=self.device,
            max_rows=max_rows,
            max_length=self.info.context_length,
            is_exact=is_exact,
        )

    def encode_image(self, placed: PlacedImage) -> torch.Tensor:
        """Returns the embeddings of an image, ``[number of placeholders, 1 + F, hidden size]``.

        The first of each placeholder replaces its embedding; the F others, of Qwen3-VL, are added
        to its row after the first layers (DeepStack, arXiv:2406.04334).
        """
        return self._tower.encode_image(placed)

    def forward(
        self,
        ids: Sequence[int],
        step: StepLayout,
        wanted: Sequence[int],
        vision_inputs: VisionInputs | None = None,
    ) -> torch.Tensor:
        """Runs a step.

        Args:
            ids: Array of shape ``[T]``, by token.
            step: The cache row and position of each id.
            wanted: ``[B]``, indices into `ids` whose logits are needed.
            vision_inputs: Positions and embeddings if a sequence of the step has images.

        Returns:
            Logits at the wanted indices, ``[B, vocab]``, float32.
        """
        padded = [*ids, *[ids[-1]] * step.padding]
        input_ids = torch.tensor([padded], device=self.device)
        num_wanted = len(wanted)
        if num_wanted and step.cache.shape.is_exact:
            wanted = [*wanted, *[wanted[-1]] * (least_tokens() - num_wanted)]
        inputs = {"input_ids": input_ids, "position_ids": step.positions.unsqueeze(0)}
        if vision_inputs is not None:
            logits_BV = self._forward_with_images(input_ids, step, wanted, vision_inputs)
            return logits_BV[:num_wanted]
        output = self._model(
            **inputs,
            use_cache=False,
            logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=self.device),
            step=step,
        )
        logits: torch.Tensor = output.logits[0, :num_wanted]
        return logits.float()

    def forward_rows(
        self, ids: Sequence[int], spans: Sequence[RowSpan], wanted: Sequence[int], caches: RowCaches
    ) -> torch.Tensor:
        """Runs a step of a model that is not flat; see `RowCaches.forward`."""
        return caches.forward(self._model, ids, spans, wanted)

    def _forward_with_images(
        self,
        input_ids: torch.Tensor,
        step: StepLayout,
        wanted: Sequence[int],
        vision_inputs: VisionInputs,
    ) -> torch.Tensor:
        embedded = self._model.get_input_embeddings()(input_ids)
        positions = vision_inputs.positions
        positions = torch.cat((positions, positions[:, -1:].expand(-1, step.padding)), dim=1)
        inputs: dict[str, Any] = {"position_ids": positions.unsqueeze(1)}
        is_image = torch.zeros_like(input_ids, dtype=torch.bool)
        for first, embeddings in vision_inputs.embeddings:
            embedded[0, first : first + len(embeddings)] = embeddings[:, 0]
            is_image[0, first : first + len(embeddings)] = True
        features = [embeddings[:, 1:] for _, embeddings in vision_inputs.embeddings]
        if features and features[0].shape[1]:
            inputs["visual_pos_masks"] = is_image
            inputs["deepstack_visual_embeds"] = torch.cat(features).unbind(1)
        # Not the whole model's forward, which computes features from pixels only.
        output = self._model.get_submodule("model.language_model")(
            inputs_embeds=embedded, **inputs, use_cache=False, step=step
        )
        hidden_BC = output.last_hidden_state[0, list(wanted)]
        logits: torch.Tensor = self._model.lm_head(hidden_BC)
        return logits.float()

    def _capture(self, router: torch.nn.Module, args: object, output: Sequence[Any]) -> None:
        self._routed.append(output[-1])  # [T, K]; logits and scores come before it

    def take_routed_experts(self) -> bytes:
        """Returns the experts of the last step's rows, ``[T, layers, K]``; see `engine.Tokens`."""
        if not self._routed:
            return b""
        experts_TLK = torch.stack(self._routed, dim=1).cpu().numpy()
        self._routed.clear()
        return experts_TLK.astype(f"<u{self.info.expert_id_bytes}").tobytes()

    def write(self, tensor: NamedTensor) -> None:
        """Overwrites a parameter or a part of it; converts the element type."""
        spec = tensor.spec
        flat = torch.frombuffer(tensor.data, dtype=TORCH_DTYPES[spec.element_type])
        first = tensor.offset // spec.element_type.size_bytes
        self._parameters[spec.name].view(-1)[first : first + len(flat)].copy_(flat)

    def overwrite(self, name: str, value: torch.Tensor) -> None:
        """Overwrites a parameter with a tensor of its shape; converts the element type."""
        self._parameters[name].copy_(value)

    def release_weights(self) -> None:
        """Moves the weights to host memory; does nothing on the CPU."""
        self._move("cpu")

    def restore_weights(self) -> None:
        """Moves the weights back to the device."""
        self._move(self.device)

    def _move(self, device: torch.device | str) -> None:
        for parameter in self._model.parameters():
            parameter.data = parameter.data.to(device)
        self._parameters = self._published_parameters()

    def _published_parameters(self) -> dict[str, torch.Tensor]:
        """Returns each tensor of a checkpoint, as the parameter or a contiguous part of it."""
        if self._renamed is None:
            return stored_views(self._model)
        named = self._model.named_parameters()
        return {_published(name, self._renamed): parameter for name, parameter in named}


def _attention(model_type: str) -> Any:
    """Returns which attention transformers is to use; None: its own."""
    if model_type in _VISION_TYPES:
        return {"text_config": IMPLEMENTATION, "vision_config": "sdpa"}
    return IMPLEMENTATION if model_type in _TEXT_TYPES else None


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"model.device is 'cuda', but torch {torch.__version__} finds no GPU: set "
            "model.device to auto or cpu, or install the CUDA build of torch on a GPU machine"
        )
    return torch.device(name)


def _stack_features(tower: torch.nn.Module, args: object, output: Any) -> None:
    """Puts the features of inner layers of a vision tower, if it has any, beside its embeddings."""
    features = getattr(output, "deepstack_features", ())
    output.pooler_output = torch.stack((output.pooler_output, *features), dim=1)


def _published(name: str, renamed: Sequence[tuple[str, str]]) -> str:
    """Returns the checkpoint name of a parameter."""
    for module, checkpoint in renamed:
        if name.startswith(module):
            return checkpoint + name.removeprefix(module)
    return name


def _quantised(path: Path, why: str) -> str:
    return (
        f"the weights in {path} are quantised ({why}), which the torch engine does not read: use "
        "the model's publication in bfloat16, or the vllm or sglang engine"
    )


def _check_supported(model_type: str, config: Any) -> None:
    if model_type not in _MODEL_TYPES and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f"model type {model_type!r} is not supported by the torch engine, which runs decoders "
            f"of text and {', '.join(_VISION_TYPES)}: use the vllm or sglang engine"
        )
    attention = {"full_attention", *(("sliding_attention",) if model_type in _TEXT_TYPES else ())}
    if model_type in _MODEL_TYPES and (
        kinds := set(getattr(config, "layer_types", None) or ()) - attention
    ):
        raise ValueError(
            f"the model has {', '.join(sorted(kinds))} layers, but the torch engine supports "
            f"{' and '.join(sorted(attention))} only: use the vllm or sglang engine"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise ValueError(
            "the model has use_bidirectional_attention=true: it does not sample token by token"
        )
    parameters = getattr(config, "rope_parameters", None) or {}
    # One set of parameters, or one for each kind of layer.
    by_layer = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    for rope in (p.get("rope_type", "default") for p in by_layer):
        if rope not in _ROPE_TYPES:
            raise ValueError(
                f"rotary embedding {rope!r} changes with the sequence length, so cached keys would "
                f"become stale: the torch engine supports {', '.join(_ROPE_TYPES)}"
            )
