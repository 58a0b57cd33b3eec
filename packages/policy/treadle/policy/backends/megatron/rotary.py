"""Rotary positions: how fast each pair of dimensions turns, as transformers computes it.

Invariant: the frequencies are those of the model's class in transformers, bit for bit. Types that
change them with the length of the sequence are refused before (`architecture.ACCEPTED`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from treadle.policy.backends.megatron.architecture import Architecture


def frequencies(architecture: Architecture) -> tuple[Tensor, float]:
    """Returns those of layers that see all rows, and a factor of their attention scores.

    Returns:
        Radians per position of each pair of dimensions that turns, float32; and what YaRN
        multiplies the scores of those dimensions by (arXiv:2309.00071, section 3.4), else 1.
    """
    if not architecture.rope_scaling:
        return _default(architecture, architecture.rope_theta), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters: dict[str, Any] = dict(architecture.rope_scaling)
    parameters["rope_theta"] = architecture.rope_theta
    parameters["partial_rotary_factor"] = architecture.rope_share
    config: Any = SimpleNamespace(
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_heads,
        head_dim=architecture.head_dim,
        max_position_embeddings=architecture.max_positions,
        rope_parameters=parameters,
        standardize_rope_params=lambda: None,  # they are
    )
    found, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    # Of queries and of keys.
    return found, factor**2


def local_frequencies(architecture: Architecture) -> Tensor | None:
    """Returns those of layers with a window, None if they do not differ."""
    if architecture.rope_local_theta is None:
        return None
    return _default(architecture, architecture.rope_local_theta)


def _default(architecture: Architecture, theta: float) -> Tensor:
    turned = int(architecture.head_dim * architecture.rope_share)
    return 1.0 / (theta ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned))
