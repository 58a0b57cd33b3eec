"""The fake backend's description before a rank starts; see `backends.description`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from treadle.policy.backends.description import (
    BackendDescription,
    Capabilities,
    MemoryEstimate,
    ModelShape,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from treadle.policy.config.choices import BackendName
    from treadle.policy.config.policy import LoraConfig, ParallelConfig, PolicyConfig

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Their embedding, last norm and output layer have the same names and arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel(ModelShape):
    """What the fake backend reads of a config.json."""

    @property
    def num_parameters(self) -> int:
        """Number of weights that are trained."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2) + self.hidden_size


class FakeDescription(BackendDescription):
    """Can nothing that is not needed."""

    name: ClassVar[BackendName] = "fake"
    capabilities: ClassVar[Capabilities] = Capabilities(other_reference=True)
    model_types: Collection[str] = MODEL_TYPES
    vision_types: Collection[str] = ()

    def read_model(self, folder: Path) -> FakeModel:
        """See `BackendDescription.read_model`."""
        file = folder / "config.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"{folder} has no config.json; expected a Hugging Face model folder"
            )
        config = json.loads(file.read_text(encoding="utf-8"))
        if (model_type := config.get("model_type")) not in MODEL_TYPES:
            raise UnsupportedModelError(
                f"model type {model_type!r} is not supported by the fake backend; supported: "
                f"{', '.join(MODEL_TYPES)}"
            )
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return FakeModel(
            model_type=model_type,
            num_layers=config["num_hidden_layers"],
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or hidden // heads,
            vocab_size=config["vocab_size"],
            max_positions=config["max_position_embeddings"],
            norm_eps=config["rms_norm_eps"],
            tied=config["tie_word_embeddings"],
        )

    def split_problems(self, model: FakeModel, parallel: ParallelConfig) -> Iterator[str]:
        """See `BackendDescription.split_problems`."""
        return iter(())

    def training_problems(self, model: FakeModel, policy: PolicyConfig) -> Iterator[str]:
        """See `BackendDescription.training_problems`."""
        if policy.moe.routing_replay or policy.moe.aux_loss_coef:
            yield "policy.moe is for a model with experts, and policy.backend=fake computes none"

    def reference_problems(self, model: FakeModel, reference: FakeModel) -> Iterator[str]:
        """See `BackendDescription.reference_problems`."""
        return iter(())

    def adapters(self, model: FakeModel, lora: LoraConfig) -> tuple[Sequence[str], int]:
        """See `BackendDescription.adapters`."""
        raise UnsupportedModelError("policy.backend=fake has no adapters")

    def memory(
        self,
        model: FakeModel,
        policy: PolicyConfig,
        *,
        rows: int,
        reference: bool = False,
        other_reference: FakeModel | None = None,
    ) -> MemoryEstimate:
        """See `BackendDescription.memory`."""
        weights = 4 * model.num_parameters
        other = 4 * other_reference.num_parameters if other_reference is not None else weights
        return MemoryEstimate(
            weights=weights,
            gradients=2 * weights,
            optimizer=2 * weights,
            reference=other * reference,
            activations=3 * 8 * rows * model.vocab_size,
            exchanged=0,
        )

    def critic_memory(self, model: FakeModel, policy: PolicyConfig, *, rows: int) -> MemoryEstimate:
        """See `BackendDescription.critic_memory`."""
        raise UnsupportedModelError("policy.backend=fake has no critic")
