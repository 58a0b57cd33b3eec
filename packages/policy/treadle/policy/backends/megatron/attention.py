"""Packed attention: sequences laid end to end in one micro-batch, each seeing only itself.

Invariant: a row of the packed micro-batch attends to the earlier rows of its own segment and to
nothing else, and rows after the last segment (padding) produce zeros and no gradient.

Megatron's own local attention refuses packed input. On a GPU all segments are one kernel
(`varlen.py`). Elsewhere segments of similar length are padded to a common length and go through one
`scaled_dot_product_attention` call: padding sits at the end, where a causal mask already hides it,
so the result is exact. Segments arrive sorted by length, so that neighbours make a group.

Where a layer has a window, a segment that fits into it is computed as without. A longer one goes
through block by block of queries, each with the keys that it may see: the work grows with length
times window. Scores that are capped are matrix products of our own, in the same blocks, computed
again in the backward pass; no kernel of torch has them, and they take several times as long.

Shape suffixes: P packed rows, N segments of a group, S rows of its longest, A heads, H heads of
queries, keys and values, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from treadle.policy.backends import varlen
from treadle.policy.backends.megatron import device
from treadle.policy.backends.megatron.experts.routing import Routing
from treadle.policy.backends.megatron.rotary import RowRotation
from treadle.policy.backends.ranks import to_device
from treadle.policy.backends.varlen import Bounds
from treadle.policy.backends.vision.rows import ImageRows

device.install()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK: Final = 512
"""Queries of a block where a window or a cap needs blocks."""

MAX_PADDED_SHARE: Final = 1.25
"""Rows of a group after padding, over before: past this a new group is begun. One call costs about
as much as 20% more rows of a short group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRule:
    """How a layer's attention scores are made.

    Attributes:
        window: Rows that a row sees, itself included; None: all before it.
        softcap: c of c tanh(score / c); None: scores are not capped.
        more: (n, x) where the part of a score that is of the first n dimensions is multiplied by x;
            None: all dimensions count alike.
        rotation: Which of the model's rotations turns queries and keys.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    more: tuple[int, float] | None = None
    rotation: int = 0


@dataclass(frozen=True, slots=True)
class SegmentGroup:
    """Consecutive segments of similar length."""

    count: int
    longest: int

    @property
    def places(self) -> int:
        """Rows after padding."""
        return self.count * self.longest


@dataclass
class Segments(PackedSeqParams):
    """The segments that Megatron hands through to `PackedAttention` unread.

    `qkv_format` stays "sbhd": to Megatron the micro-batch is one sequence of batch size 1. It turns
    no queries and keys: `PackedAttention` does, by the rows' positions.
    """

    groups: tuple[SegmentGroup, ...] = ()
    slots_P: Tensor | None = None
    """Where each row goes among the padded rows of all groups; None if nothing is padded."""
    bounds: Bounds | None = None
    rotations: tuple[RowRotation, ...] = ()
    """How rows are turned, by `ScoreRule.rotation`; the model sets it."""
    routing: Routing = field(default_factory=Routing)
    """The description of the rows for the routers of layers with experts."""
    images: ImageRows | None = None
    """Which rows are images, on the first stage of a model that sees; None: no row is."""

    def attend(self, joined_PHD: Tensor, heads: Sequence[int], scores: ScoreRule) -> Tensor:
        """Attends within each segment; returns [P, A * D].

        Args:
            joined_PHD: Queries, keys and values of each row, side by side.
            heads: How many of each there are.
        """
        assert self.bounds is not None
        rows = joined_PHD[: self.bounds.rows]
        query, key, value = rows.split(heads, 1)
        if scores.softcap is None and varlen.can_attend(query, value):
            out = varlen.attend(
                query, key, value, self.bounds, scale=scores.scale, window=scores.window
            ).flatten(1)
        else:
            out = self._padded(rows, heads, scores)
        padding = len(joined_PHD) - len(rows)
        return F.pad(out, (0, 0, 0, padding)) if padding else out

    def _padded(self, rows_PHD: Tensor, heads: Sequence[int], scores: ScoreRule) -> Tensor:
        """Attends group by group, of rows that are no padding."""
        places = [group.places for group in self.groups]
        spread = rows_PHD
        if self.slots_P is not None:
            spread = rows_PHD.new_zeros(sum(places), *rows_PHD.shape[1:])
            spread.index_copy_(0, self.slots_P, rows_PHD)
        outputs = [
            _attend_group(part, group, heads, scores)
            for part, group in zip(spread.split(places), self.groups, strict=True)
        ]
        out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return out if self.slots_P is None else take_rows(out, self.slots_P)

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], at: torch.device) -> Segments:
        """Group segments; `lengths` are in packing order, which must be ascending."""
        groups: list[SegmentGroup] = []
        slots: list[NDArray[np.int64]] = []
        first = start = 0
        while first < len(lengths):
            last = end_of_group(lengths, first)
            groups.append(SegmentGroup(last - first, lengths[last - 1]))
            for length in lengths[first:last]:
                slots.append(np.arange(start, start + length))
                start += groups[-1].longest
            first = last
        padded = start > sum(lengths)
        return cls(
            qkv_format="sbhd",
            groups=tuple(groups),
            slots_P=to_device(np.concatenate(slots), at) if padded else None,
            bounds=Bounds.of_lengths(lengths, at),
        )


def end_of_group(lengths: Sequence[int], first: int) -> int:
    """Returns where the group that begins at `first` ends; `lengths` must be ascending."""
    rows, last = lengths[first], first + 1
    while last < len(lengths):
        assert lengths[last] >= lengths[last - 1], "segments must be packed in ascending length"
        padded = lengths[last] * (last + 1 - first)
        if padded > MAX_PADDED_SHARE * (rows + lengths[last]):
            break
        rows += lengths[last]
        last += 1
    return last


class _TakeRows(torch.autograd.Function):
    """`x[index]` for an index without repetitions: its gradient is a copy, not an accumulation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        full = grad.new_zeros(ctx.rows, *grad.shape[1:])
        return full.index_copy_(0, index, grad), None


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """`x[index]` along the first dimension; `index` must not repeat a row."""
    rows: Tensor = _TakeRows.apply(x, index)  # type: ignore[no-untyped-call]
    return rows


def _attend_group(
    rows_PHD: Tensor, group: SegmentGroup, heads: Sequence[int], scores: ScoreRule
) -> Tensor:
    rows_NHSD = rows_PHD.view(group.count, group.longest, *rows_PHD.shape[1:]).transpose(1, 2)
    query, key, value = rows_NHSD.split(heads, 1)
    if scores.softcap is None and (scores.window is None or group.longest <= scores.window):
        out_NASD = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=scores.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    else:
        out_NASD = _attend_in_blocks(query, key, value, scores)
    return out_NASD.transpose(1, 2).reshape(group.places, -1)


def _attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule) -> Tensor:
    """Returns [N, A, S, D], a block of queries at a time, each with the keys that it sees."""
    length = query.shape[2]
    at = torch.arange(length, device=query.device)
    outputs = []
    for start in range(0, length, _BLOCK):
        stop = min(start + _BLOCK, length)
        first = 0 if scores.window is None else max(0, start - scores.window + 1)
        distance = at[start:stop, None] - at[first:stop]
        seen = distance >= 0
        if scores.window is not None:
            seen &= distance < scores.window
        block = (query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop])
        if scores.softcap is None:
            out = F.scaled_dot_product_attention(
                *block,
                attn_mask=seen,
                scale=scores.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        else:
            out = checkpoint(
                _capped, *block, seen, scores, use_reentrant=False, preserve_rng_state=False
            )
        outputs.append(out)
    return torch.cat(outputs, 2)


def _capped(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scores: ScoreRule) -> Tensor:
    """Returns the attention of one block with capped scores, as matrix products."""
    assert scores.softcap is not None
    num, heads, rows, size = query.shape
    # The queries of a key-value head side by side, so that no key is repeated.
    folded = query.reshape(num, key.shape[1], -1, size)
    products = (folded @ key.transpose(2, 3)).float() * (scores.scale / scores.softcap)
    capped = products.tanh().view(num, heads, rows, -1) * scores.softcap
    weights = capped.masked_fill(~seen, float("-inf")).softmax(-1).to(value.dtype)
    return (weights.view(*folded.shape[:3], -1) @ value).view_as(query)


class PackedAttention(MegatronModule):
    """The `core_attention` of a Megatron layer spec, by torch's scaled dot-product attention."""

    def __init__(self, config: Any, layer_number: int, *, scores: Sequence[ScoreRule], **_: Any):
        """Called by Megatron, with more than is needed; `scores`, by layer, are from the spec."""
        super().__init__(config=config)
        self._scores = scores[layer_number - 1]

    def forward(
        self,
        query_P1AD: Tensor,
        key_P1AD: Tensor,
        value_P1AD: Tensor,
        attention_mask: None,
        *,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: Segments,
    ) -> Tensor:
        """Rotates queries and keys, attends within the packed segments; returns [P, 1, A * D]."""
        query, key, value = (x.squeeze(1) for x in (query_P1AD, key_P1AD, value_P1AD))
        scores = self._scores
        rotation = packed_seq_params.rotations[scores.rotation]
        joined = rotation.join(query, key, value, scores.more)
        heads = query.shape[1], key.shape[1], value.shape[1]
        return packed_seq_params.attend(joined, heads, scores).unsqueeze(1)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing: attention has no state."""
        return {}
