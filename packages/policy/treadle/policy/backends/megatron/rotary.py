"""Rotary positions: how fast each pair of dimensions turns, as transformers computes it.

Invariant: the frequencies are those of the model's class in transformers, bit for bit. Types that
change them with the length of the sequence are refused before (`architecture.ACCEPTED`).

Shape suffixes: P packed rows, A heads, K key-value heads, D head size, R dimensions that turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.policy.backends.fused import fused

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


@dataclass(frozen=True, slots=True)
class RowRotation:
    """How the rows of a micro-batch are turned, computed once for all layers that share it.

    Attributes:
        cos_P1R: Cosine for each dimension that turns, in the type of the model.
        sin_P1R: Sine, negated where the other dimension of a pair is subtracted.
        interleaved: Whether the dimensions of a pair are neighbours; else halves of what turns.
    """

    cos_P1R: Tensor
    sin_P1R: Tensor
    interleaved: bool

    @classmethod
    def of_angles(cls, angles_PR: Tensor, dtype: torch.dtype, *, interleaved: bool) -> RowRotation:
        """Returns it for the angle of each pair, [P, R / 2], in radians, float32."""
        cos, sin = angles_PR.cos().to(dtype), angles_PR.sin().to(dtype)
        if interleaved:
            cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
        else:
            cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return cls(cos[:, None], sin[:, None], interleaved)

    def join(
        self, query_PAD: Tensor, key_PKD: Tensor, value_PKD: Tensor, more: tuple[int, float] | None
    ) -> Tensor:
        """Returns [P, A + 2 K, D]: turned queries, turned keys, and values, side by side.

        Args:
            more: (n, x) where the first n dimensions of queries are multiplied by x after it.
        """
        joined: Tensor = _Join.apply(  # type: ignore[no-untyped-call]
            query_PAD, key_PKD, value_PKD, self, more
        )
        return joined


class _Join(torch.autograd.Function):
    """Few passes over the rows, and nothing of their size kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotation: RowRotation,
        more: tuple[int, float] | None,
    ) -> Tensor:
        ctx.heads = query.shape[1], key.shape[1], value.shape[1]
        ctx.rotation, ctx.more = rotation, more
        cos, sin = rotation.cos_P1R, rotation.sin_P1R
        return _joined(query, key, value, cos, sin, rotation.interleaved, more)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rotation: RowRotation = ctx.rotation
        back = _turned_back(
            grad, rotation.cos_P1R, rotation.sin_P1R, rotation.interleaved, ctx.more, ctx.heads
        )
        return (*back.split(ctx.heads, 1), None, None)


def _swapped(x_PAR: Tensor, interleaved: bool) -> Tensor:
    """Exchanges the two dimensions of each pair."""
    if interleaved:
        swapped: Tensor = x_PAR.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return swapped
    first, second = x_PAR.chunk(2, -1)
    return torch.cat((second, first), -1)


@fused
def _joined(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    more: tuple[int, float] | None,
) -> Tensor:
    joined = torch.cat((query, key, value), 1)
    turning = joined[:, : -value.shape[1], : cos.shape[-1]]
    other = _swapped(turning, interleaved).mul_(sin)
    turning.mul_(cos).add_(other)
    if more is not None:
        joined[:, : query.shape[1], : more[0]] *= more[1]
    return joined


@fused
def _turned_back(
    grad: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    more: tuple[int, float] | None,
    heads: tuple[int, int, int],
) -> Tensor:
    back = grad.clone()
    if more is not None:
        back[:, : heads[0], : more[0]] *= more[1]
    turning = back[:, : -heads[2], : cos.shape[-1]]
    other = _swapped(turning * sin, interleaved)
    turning.mul_(cos).add_(other)
    return back
