"""Attention over packed sequences, behind transformers' attention interface.

Invariant: a sequence of a packed row sees only itself: each is computed by itself, or, where a mask
is not needed, all by one kernel of a GPU (`varlen.py`).

A layer's mask is made once for the longest sequence, which comes first in its row: windows and
chunks count from a sequence's start, so the mask of a shorter one is its corner.

Shape suffixes: B rows, H heads, K key-value heads, P packed positions, L of a sequence, D head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from treadle.policy.backends import varlen
from treadle.policy.backends.fsdp.context import Context
from treadle.policy.backends.ranks import device
from treadle.policy.backends.varlen import Bounds

NAME: Final = "treadle_packed"
"""What a model's `attn_implementation` is for this."""

_NO_EFFECT: Final = frozenset(
    ("dropout", "sliding_window", "position_ids", "use_cache", "deterministic", "output_attentions")
)
"""What layers give besides: windows are in the mask, and the rest is not used in training."""

_ALONE: Final = Context()
# The lengths of the sequences in the one row of a forward pass, the longest first, and in its
# backward pass, which may run it again. A rank computes one micro-batch at a time, but autograd has
# threads of its own.
_lengths: Sequence[int] = ()
_bounds: Bounds | None = None
"""The same for a GPU's kernel."""
_context = _ALONE


@contextmanager
def packed(lengths: Sequence[int], context: Context = _ALONE) -> Iterator[None]:
    """Sets the lengths of the sequences in the row of the passes inside, the longest first.

    Args:
        context: The ranks that share the row.
    """
    global _lengths, _bounds, _context
    _lengths, _context, at = lengths, context, device()
    _bounds = Bounds.of_lengths(lengths, at) if lengths and at.type == "cuda" else None
    try:
        yield
    finally:
        _lengths, _bounds, _context = (), None, _ALONE


def _mask(*, q_length: int, kv_length: int, use_vmap: bool, **others: Any) -> Tensor | None:
    """Returns the [1, 1, L, L] mask of the longest sequence; None if it is causal."""
    longest = _lengths[0]
    # Boundaries are behind the longest sequence; without them no mask need be made of causal ones.
    others["allow_is_causal_skip"] = not use_vmap
    others["attention_mask"] = None  # given to have no boundaries looked for, see `net`
    return sdpa_mask(q_length=longest, kv_length=longest, use_vmap=use_vmap, **others)


def _attend(
    module: torch.nn.Module,
    query_BHPD: Tensor,
    key_BKPD: Tensor,
    value_BKPD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes one layer's attention, as `ALL_ATTENTION_FUNCTIONS` of transformers call it.

    Raises:
        ValueError: The layer has more to its attention than is computed here.
    """
    given = {name for name, value in others.items() if value is not None and value is not False}
    if unknown := given - _NO_EFFECT:
        raise ValueError(f"attention with {', '.join(sorted(unknown))} is not packed")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    context, lengths = _context, list(_lengths)
    of_sequences: tuple[Tensor, ...] = (query_BHPD, key_BKPD, value_BKPD)
    if context.size > 1:
        of_sequences = context.of_heads(*of_sequences)
        s_aux = None if s_aux is None else s_aux.chunk(context.size)[context.rank]
    is_plain = attention_mask is None and softcap is None and s_aux is None
    if is_plain and causal and _bounds is not None and varlen.can_attend(query_BHPD, value_BKPD):
        query, key, value = (x[0].transpose(0, 1) for x in of_sequences)
        output = varlen.attend(query, key, value, _bounds, scale=scaling)
        return _own_positions(output.transpose(0, 1)[None]), None
    parts = []
    for q, k, v in zip(*(x.split(lengths, 2) for x in of_sequences), strict=True):
        mask = None if attention_mask is None else attention_mask[..., : q.shape[2], : q.shape[2]]
        if softcap is None and s_aux is None:
            part = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None and causal,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        else:
            part = _by_products(q, k, v, mask, scaling, softcap, s_aux)
        parts.append(part)
    return _own_positions(torch.cat(parts, 2)), None


def _own_positions(output_BHPD: Tensor) -> Tensor:
    """Returns [B, P, H, D] with the positions of this rank, as transformers expect it."""
    if _context.size > 1:
        output_BHPD = _context.of_positions(output_BHPD)
    return output_BHPD.transpose(1, 2).contiguous()


def _by_products(
    query_BHLD: Tensor,
    key_BKLD: Tensor,
    value_BKLD: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Computes what torch has no kernel for: capped scores, and sinks.

    A sink is one more score of each head, which takes its share of the softmax and gives nothing.
    """
    groups = query_BHLD.shape[1] // key_BKLD.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key_BKLD, value_BKLD))
    scale = query_BHLD.shape[-1] ** -0.5 if scaling is None else scaling
    scores_BHLL = query_BHLD @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores_BHLL = (scores_BHLL / softcap).tanh() * softcap
    if mask is None:
        length = scores_BHLL.shape[-1]
        mask = torch.ones(length, length, dtype=torch.bool, device=key.device).tril()
    scores_BHLL = scores_BHLL.float().masked_fill(~mask, float("-inf"))
    if sinks_H is not None:
        sinks = sinks_H.float().reshape(1, -1, 1, 1).expand(*scores_BHLL.shape[:3], 1)
        scores_BHLL = torch.cat([scores_BHLL, sinks], -1)
    shares_BHLL = scores_BHLL.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return shares_BHLL @ value


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)
