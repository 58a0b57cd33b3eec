"""The model: a Hugging Face causal LM whose attention reads our cache rows.

Invariant: the weights are those of one version, whole. New ones are checked by name, shape
and completeness and copied aside before the first parameter is touched, so `apply_weights`
cannot fail half way.

Taken: Llama, Qwen2 and Qwen3 with full attention in every layer and a rotary embedding that
does not depend on the sequence's length; anything else is refused at load, not later.

Everything here runs on the compute thread; nothing waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from treadle.rollout_server.engine import ElementType, TensorSpec
from treadle.rollout_server.engines.torch.attention import (
    IMPLEMENTATION,
    StepLayout,
    cached_attention,
)
from treadle.rollout_server.engines.torch.kv_rows import KvShape
from treadle.rollout_server.model_files import read_model

_MODEL_TYPES = ("llama", "qwen2", "qwen3")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

TORCH_DTYPES = {
    ElementType.FLOAT32: torch.float32,
    ElementType.BFLOAT16: torch.bfloat16,
    ElementType.FLOAT16: torch.float16,
    ElementType.FLOAT8_E4M3FN: torch.float8_e4m3fn,
}
_ELEMENT_TYPES = {dtype: element_type for element_type, dtype in TORCH_DTYPES.items()}

_AUTO_MODEL: Any = AutoModelForCausalLM  # Untyped in transformers.

AttentionInterface.register(IMPLEMENTATION, cached_attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model comes from and how it is held.

    Attributes:
        path: Directory with ``config.json`` and ``*.safetensors``.
        dtype: Of weights and cache.
        device: "cpu", "cuda", or "auto": CUDA when there is one.
        context_length: None: what the model allows.
    """

    path: Path
    dtype: ElementType
    device: str
    context_length: int | None = None


class CachedModel:
    """A causal LM that reads one flat row of tokens a step.

    Raises:
        ValueError: The model is of a kind that is not taken.
        OSError: Its files are not there.
    """

    def __init__(self, source: ModelSource) -> None:
        self.device = _resolve_device(source.device)
        self.dtype = TORCH_DTYPES[source.dtype]
        self.info = read_model(source.path, context_length=source.context_length)
        config: Any = AutoConfig.from_pretrained(source.path, local_files_only=True)
        _check_supported(config)
        self._model, report = _AUTO_MODEL.from_pretrained(
            source.path,
            config=config,
            dtype=self.dtype,
            attn_implementation=IMPLEMENTATION,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
        if report["missing_keys"]:  # transformers would leave random numbers there.
            raise ValueError(
                f"{source.path} lacks {len(report['missing_keys'])} weights of the model, "
                f"{min(report['missing_keys'])!r} for one: copy the whole checkpoint"
            )
        self._model.requires_grad_(False).train(False).to(self.device)
        self._parameters: dict[str, torch.nn.Parameter] = dict(self._model.named_parameters())
        self.num_layers: int = config.num_hidden_layers
        self.num_kv_heads: int = config.num_key_value_heads
        self.queries_per_head: int = config.num_attention_heads // config.num_key_value_heads
        self.head_dim: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )

    @property
    def parameters(self) -> tuple[TensorSpec, ...]:
        """Every parameter once; a tied head is not listed, its embedding is."""
        return tuple(
            TensorSpec(
                name=name,
                element_type=_ELEMENT_TYPES[parameter.dtype],
                shape=tuple(parameter.shape),
            )
            for name, parameter in self._parameters.items()
        )

    def kv_shape(self, *, max_rows: int) -> KvShape:
        """The shape of a cache for this model."""
        return KvShape(
            num_layers=self.num_layers,
            num_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            device=self.device,
            max_rows=max_rows,
            max_length=self.info.context_length,
        )

    def forward(self, ids: Sequence[int], step: StepLayout, wanted: Sequence[int]) -> torch.Tensor:
        """Runs a step.

        Args:
            ids: ``[T]``.
            step: Where each id stands.
            wanted: ``[B]`` indices into `ids`.

        Returns:
            Logits after the wanted ids, ``[B, vocab]``, float32.
        """
        output = self._model(
            input_ids=torch.tensor([ids], device=self.device),
            position_ids=step.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=self.device),
            step=step,
        )
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    def stage(self, spec: TensorSpec, data: memoryview) -> torch.Tensor:
        """Copies a tensor aside in host memory, converted to the type held."""
        flat = torch.frombuffer(data, dtype=TORCH_DTYPES[spec.element_type])
        return flat.reshape(spec.shape).to(self.dtype, copy=True)

    def apply_weights(self, staged: dict[str, torch.Tensor]) -> None:
        """Replaces the weights by staged ones, which hold every parameter in its shape."""
        for name, parameter in self._parameters.items():
            parameter.copy_(staged[name])

    def release_weights(self) -> None:
        """Moves the weights to host memory; where they live there already, does nothing."""
        for parameter in self._parameters.values():
            parameter.data = parameter.data.to("cpu")

    def restore_weights(self) -> None:
        """Moves the weights back."""
        for parameter in self._parameters.values():
            parameter.data = parameter.data.to(self.device)


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _check_supported(config: Any) -> None:
    if config.model_type not in _MODEL_TYPES:
        raise ValueError(
            f"model type {config.model_type!r} is not taken by the torch engine, which runs "
            f"{', '.join(_MODEL_TYPES)}: use the vllm or sglang engine"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise ValueError(
            f"the model has {', '.join(sorted(kinds))} layers and the torch engine runs "
            "full_attention only: use the vllm or sglang engine"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _ROPE_TYPES:
        raise ValueError(
            f"rotary embedding {rope!r} changes with the length of the sequence, so cached keys "
            f"would go stale: the torch engine takes {', '.join(_ROPE_TYPES)}"
        )
