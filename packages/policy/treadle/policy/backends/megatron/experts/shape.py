"""The experts of a model, as its Hugging Face config has them.

Invariant: as in `architecture`, an `ExpertShape` can be built exactly, and a config with anything
else is rejected. `router_aux_loss_coef` is ignored: it changes no output of the model, and
`policy.moe.aux_loss_coef` sets the load-balancing loss of training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Sizes and variants of the layers with experts.

    Attributes:
        per_token: How many of them a token goes to.
        normalised: Whether the weights of a token's experts add up to 1.
        layers: Numbers of the layers with experts, the first layer of the model being 0; the
            others are dense.
    """

    number: int
    per_token: int
    ffn_size: int
    normalised: bool
    layers: tuple[int, ...]

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> ExpertShape | None:
        """Reads a transformers config of a type that may have experts; None if no layer has any."""
        number = config.num_experts
        layers = tuple(
            layer
            for layer in range(config.num_hidden_layers)
            if number > 0
            and layer not in config.mlp_only_layers
            and (layer + 1) % config.decoder_sparse_step == 0
        )
        if not layers:
            return None
        return cls(
            number=number,
            per_token=config.num_experts_per_tok,
            ffn_size=config.moe_intermediate_size,
            normalised=bool(config.norm_topk_prob),
            layers=layers,
        )

    def num_parameters(self, hidden_size: int) -> int:
        """Returns the weights of one layer's router and experts."""
        return self.number * hidden_size * (1 + 3 * self.ffn_size)

    def among(self, layers: Sequence[int]) -> int:
        """Returns how many of some layers have experts."""
        return len(set(layers) & set(self.layers))
