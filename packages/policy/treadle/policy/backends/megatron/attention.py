"""Packed attention: sequences laid end to end in one micro-batch, each seeing only itself.

Invariant: a row of the packed micro-batch attends to the earlier rows of its own segment and to
nothing else, and rows after the last segment (padding) produce zeros and no gradient.

Megatron's own local attention refuses packed input. Here segments of similar length are padded to a
common length and go through one `scaled_dot_product_attention` call: padding sits at the end, where
a causal mask already hides it, so the result is exact. Segments arrive sorted by length, which
makes each such group a contiguous slice of the micro-batch.

Where a layer has a window, a segment that fits into it is computed as without. A longer one goes
through block by block of queries, each with the keys that it may see: the work grows with length
times window. Scores that are capped are matrix products of our own, in the same blocks, computed
again in the backward pass; no kernel of torch has them, and they take several times as long.

Shape suffixes: P packed rows, N segments of a group, S rows of its longest, A heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from treadle.policy.backends.megatron import device
from treadle.policy.backends.megatron.experts.routing import Routing
from treadle.policy.backends.vision.rows import ImageRows

device.install()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402

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
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    more: tuple[int, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentGroup:
    """Consecutive segments of similar length."""

    start: int
    stop: int
    """Their rows are [start, stop) of the micro-batch."""
    count: int
    longest: int
    slots_P: Tensor | None
    """Where each row goes among count * longest padded rows; None if all are equally long."""


@dataclass
class Segments(PackedSeqParams):
    """The segments that Megatron hands through to `PackedAttention` unread.

    `qkv_format` stays "sbhd": to Megatron the micro-batch is one sequence of batch size 1, and the
    rotary angles, given per row, restart with each segment.
    """

    groups: tuple[SegmentGroup, ...] = ()
    routing: Routing = field(default_factory=Routing)
    """The rows, as the routers of layers with experts are told of them."""
    images: ImageRows | None = None
    """Which rows are images, on the first stage of a model that sees; None: no row is."""

    def attend(
        self, query_PAD: Tensor, key_PAD: Tensor, value_PAD: Tensor, scores: ScoreRule
    ) -> Tensor:
        """Attends within each segment; returns [P, A * D]."""
        rows = (query_PAD, key_PAD, value_PAD)
        outputs = [_attend_group(rows, group, scores) for group in self.groups]
        padding = query_PAD.shape[0] - self.groups[-1].stop
        if padding:
            outputs.append(outputs[-1].new_zeros(padding, outputs[-1].shape[1]))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], at: torch.device) -> Segments:
        """Group segments; `lengths` are in packing order, which must be ascending."""
        groups: list[SegmentGroup] = []
        start = first = 0
        while first < len(lengths):
            last = end_of_group(lengths, first)
            members = lengths[first:last]
            rows = sum(members)
            groups.append(
                SegmentGroup(
                    start=start,
                    stop=start + rows,
                    count=len(members),
                    longest=members[-1],
                    slots_P=_slots(members, at),
                )
            )
            start, first = start + rows, last
        return cls(qkv_format="sbhd", groups=tuple(groups))


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


def _slots(lengths: Sequence[int], at: torch.device) -> Tensor | None:
    longest = lengths[-1]
    if lengths[0] == longest:
        return None
    return torch.cat([torch.arange(n, device=at) + i * longest for i, n in enumerate(lengths)])


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


def _attend_group(rows: Sequence[Tensor], group: SegmentGroup, scores: ScoreRule) -> Tensor:
    query, key, value = (_spread(x[group.start : group.stop], group) for x in rows)
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
    out = out_NASD.transpose(1, 2).reshape(group.count * group.longest, -1)
    return out if group.slots_P is None else take_rows(out, group.slots_P)


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


def _spread(x_PAD: Tensor, group: SegmentGroup) -> Tensor:
    """[P, A, D] -> [N, A, S, D], zeros where a segment is shorter than the longest."""
    if group.slots_P is not None:
        padded = x_PAD.new_zeros(group.count * group.longest, *x_PAD.shape[1:])
        x_PAD = padded.index_copy(0, group.slots_P, x_PAD)
    return x_PAD.view(group.count, group.longest, *x_PAD.shape[1:]).transpose(1, 2)


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
        """Attends as the packing says; returns [P, 1, A * D]."""
        query, key, value = (x.squeeze(1) for x in (query_P1AD, key_P1AD, value_P1AD))
        if self._scores.more is not None:
            size, factor = self._scores.more
            query = torch.cat((query[..., :size] * factor, query[..., size:]), dim=-1)
        return packed_seq_params.attend(query, key, value, self._scores).unsqueeze(1)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing: attention has no state."""
        return {}
