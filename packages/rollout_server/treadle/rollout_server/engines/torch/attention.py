"""Attention of one step: tokens of many sequences in one flat row, against their cache rows.

Invariant: a step is one forward pass over `[1, T]` ids. The linear layers see hardly any padding:
T is a multiple of four, and a little more in a very small step. Attention pads within a *group* of
neighbouring rows, which ends where more padding would cost more than another kernel call. A
sequence in prefill and one in decode differ only in their number of query tokens, so prompts are
read in chunks next to decoding sequences, and drafts next to last tokens.

In an exact cache, for float32 on a CPU, the bits of a token's results do not depend on what else a
step computes: on other rows, on how many tokens of its own sequence are read with it, on whether a
prefix is shared. So drafts change no log-probability. Two rules give that, with kernels whose sum
for an element has the same order for any four or more rows (those of MKL; `exact_test.py` compares
whole models). Their padding and calls cost 15 to 60 % of a pass of the demo's model, by its batch:

- No matrix has fewer than four rows, or eight for each of several threads; a smaller one repeats
  its last. Activations are computed in whole vectors (`activations.py`).
- A sum over positions is one of chunks of `CHUNK` positions from 0 on, added in their order, and a
  softmax is over a multiple of `LENGTH_UNIT`. A masked position has weight zero, so the zeros after
  a sequence's end change no bit.

Rows that begin with the same ids have the same keys and values there. Decoding is bound by
reading them, so a group of decoding rows reads such a shared prefix once, from its first row,
as one matrix product (Juravsky et al. 2024, arXiv 2402.05099). Measured on a CPU with 64 rows
of 210 positions, 140 of them shared: 2.7 times as fast. Half precision shares nothing: it would
round the scores, unlike the fused kernel.

A layer may have a sliding window, and its scores a cap. Both share nothing: the first positions of
a prefix may be outside the window. The cache keeps all positions either way.

transformers calls `cached_attention` in every layer (its `AttentionInterface`), with the
`StepLayout` passed through the model's keyword arguments.

Shapes: T tokens, R rows of a group, Q queries per row (padded), N positions, H query heads,
K key-value heads, G = H / K, D head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from treadle.rollout_server.engines.torch.kv_cache import LENGTH_UNIT, KvCache

IMPLEMENTATION = "treadle_cached_rows"
"""Name under which `cached_attention` is registered in transformers."""

CHUNK = 64
"""Number of positions that are summed together."""
LEAST_ROWS = 4
"""Least number of rows of a matrix product whose bits do not depend on their number."""

_CALL_COST = 1024  # Cost of one more kernel call, in query-key pairs.
_SHARED_CALL_COST = 8192  # With a shared prefix, which takes several calls more.
_FEW_QUERIES = 64  # A group with more queries in a row shares nothing.
_BLOCK = 256  # Queries of a row whose scores are in memory at a time.


def least_tokens() -> int:
    """Returns the least number of rows of a linear layer: threads share them in blocks."""
    threads = torch.get_num_threads()
    return LEAST_ROWS if threads == 1 else 2 * LEAST_ROWS * threads


class RowSpan(NamedTuple):
    """The tokens of one row in a step: positions ``[start, stop)``."""

    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Number of query tokens of the row."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class _Group:
    rows: slice  # Of the cache.
    tokens: slice  # Of the flat row of tokens.
    num_queries: int  # Q
    kv_length: int  # N
    mask: torch.Tensor  # [R, 1, 1 or G * Q, N - shared]: what is added to the scores.
    shared: int  # Number of leading positions that are read from the first row only.
    scatter: tuple[torch.Tensor, torch.Tensor] | None  # Row and query of each token; None: dense.
    position_RQ: torch.Tensor
    queries_per_head: int  # G
    unshared_masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def unshared_mask(self, window: int | None) -> torch.Tensor:
        """Returns the mask of a layer with this window that shares nothing; made once per step."""
        if window is None and not self.shared:
            return self.mask
        if window not in self.unshared_masks:
            hidden_RQN = _hidden(self.position_RQ, self.kv_length, window)
            mask = _scores_mask(hidden_RQN, self.queries_per_head, self.mask.dtype)
            self.unshared_masks[window] = mask.to(self.mask.device)
        return self.unshared_masks[window]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The cache row and position of every token; built once per step, read by every layer.

    Attributes:
        cache: Cache that keys and values are written to and read from.
        positions: ``[T + padding]``, position of each token in its sequence.
        cache_rows: ``[T]``, cache row of each token.
        padding: Number of times that the last token is repeated after the T tokens; these are not
            written to the cache.
    """

    cache: KvCache
    positions: torch.Tensor
    cache_rows: torch.Tensor
    groups: tuple[_Group, ...]
    padding: int

    @classmethod
    def build(
        cls, cache: KvCache, spans: Sequence[RowSpan], *, queries_per_head: int, shared: int
    ) -> "StepLayout":
        """Builds the layout of a step.

        Args:
            cache: Cache with room for every span.
            spans: Spans of rows 0, 1, 2 and so on; each has at least one token.
            shared: Number of leading positions that are equal in all rows that have them.
        """
        device = cache.shape.device
        rows = [row for row, span in enumerate(spans) for _ in range(span.num_tokens)]
        positions = [p for span in spans for p in range(*span)]
        padding = 0
        if cache.shape.is_exact:
            padding = max(least_tokens() - len(rows), -len(rows) % LEAST_ROWS)
            shared -= shared % CHUNK
        elif cache.shape.dtype is not torch.float32:
            shared = 0
        groups: list[_Group] = []
        first_token = 0
        is_exact = cache.shape.is_exact
        for first, stop in _split(spans, shared if is_exact else 0, is_exact=is_exact):
            for block in _blocks(spans[first:stop], is_exact):
                group = _make_group(cache, block, first, first_token, queries_per_head, shared)
                first_token = group.tokens.stop
                groups.append(group)
        return cls(
            cache=cache,
            positions=torch.tensor(positions + positions[-1:] * padding, device=device),
            cache_rows=torch.tensor(rows, device=device),
            groups=tuple(groups),
            padding=padding,
        )


def _split(
    spans: Sequence[RowSpan], shared: int, *, is_exact: bool = False
) -> list[tuple[int, int]]:
    """Splits rows into runs; a row starts a new run where padding would cost more than a call.

    In an exact cache also where a row has more queries than a block.
    """
    call_cost = _SHARED_CALL_COST if shared else _CALL_COST

    def own(span: RowSpan) -> int:
        return (
            span.stop
            if span.start < shared or span.num_tokens > _FEW_QUERIES
            else span.stop - shared
        )

    runs: list[tuple[int, int]] = []
    first, queries, length = 0, spans[0].num_tokens, own(spans[0])
    for row, span in enumerate(spans[1:], start=1):
        joint_queries, joint_length = max(queries, span.num_tokens), max(length, own(span))
        joint = (row - first + 1) * joint_queries * joint_length
        apart = (row - first) * queries * length + span.num_tokens * own(span)
        if joint > apart + call_cost or (is_exact and joint_queries > _BLOCK):
            runs.append((first, row))
            first, queries, length = row, span.num_tokens, own(span)
        else:
            queries, length = joint_queries, joint_length
    runs.append((first, len(spans)))
    return runs


def _blocks(spans: Sequence[RowSpan], is_exact: bool) -> Iterator[Sequence[RowSpan]]:
    """Yields the spans, or parts of a long one, which is alone, whose scores take memory."""
    start, stop = spans[0]
    if not is_exact or stop - start <= _BLOCK:
        yield spans
        return
    for first in range(start, stop, _BLOCK):
        yield [RowSpan(first, min(first + _BLOCK, stop))]


def _make_group(
    cache: KvCache,
    spans: Sequence[RowSpan],
    first_row: int,
    first_token: int,
    queries_per_head: int,
    shared: int,
) -> _Group:
    dtype, device = cache.shape.dtype, cache.shape.device
    counts = torch.tensor([span.num_tokens for span in spans])
    num_queries = int(counts.max())
    kv_length = max(span.stop for span in spans)
    if cache.shape.is_exact:
        kv_length += -kv_length % LENGTH_UNIT
    starts = torch.tensor([span.start for span in spans])
    query = torch.arange(num_queries)
    # A padded query repeats the last real one: a row without any allowed key would be NaN.
    position_RQ = starts[:, None] + torch.minimum(query, counts[:, None] - 1)
    mask = _scores_mask(_hidden(position_RQ, kv_length, None), queries_per_head, dtype)
    shared = _worth_sharing(shared, spans, num_queries, is_exact=cache.shape.is_exact)
    scatter = None
    if int(counts.min()) != num_queries:
        row, column = (query < counts[:, None]).nonzero(as_tuple=True)
        scatter = (row.to(device), column.to(device))
    return _Group(
        rows=slice(first_row, first_row + len(spans)),
        tokens=slice(first_token, first_token + int(counts.sum())),
        num_queries=num_queries,
        kv_length=kv_length,
        mask=mask[..., shared:].to(device),
        shared=shared,
        scatter=scatter,
        position_RQ=position_RQ,
        queries_per_head=queries_per_head,
    )


def _hidden(position_RQ: torch.Tensor, kv_length: int, window: int | None) -> torch.Tensor:
    """Returns ``[R, Q, N]``, whether a query may not see a position."""
    position_RQ1, at_N = position_RQ[:, :, None], torch.arange(kv_length)
    hidden_RQN = at_N > position_RQ1
    return hidden_RQN if window is None else hidden_RQN | (at_N <= position_RQ1 - window)


def _scores_mask(
    hidden_RQN: torch.Tensor, queries_per_head: int, dtype: torch.dtype
) -> torch.Tensor:
    """Returns what is added to the scores, ``[R, 1, 1 or G * Q, N]``."""
    mask_RQN = torch.zeros(hidden_RQN.shape, dtype=dtype).masked_fill_(hidden_RQN, -torch.inf)
    repeats = queries_per_head if hidden_RQN.shape[1] > 1 else 1
    return mask_RQN.repeat(1, repeats, 1).unsqueeze(1)


def _worth_sharing(
    shared: int, spans: Sequence[RowSpan], num_queries: int, *, is_exact: bool
) -> int:
    """Returns how many shared leading positions a group reads once; 0 if it does not pay."""
    if num_queries > (_FEW_QUERIES if is_exact else 1):
        return 0
    shared = min(shared, *(span.start for span in spans))
    if is_exact:
        shared = shared - shared % CHUNK if len(spans) >= LEAST_ROWS else 0
    return shared if shared * (len(spans) - 1) >= _CALL_COST else 0


def cached_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    step: StepLayout,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_unused: Any,  # transformers passes dropout and more to every backend.
) -> tuple[torch.Tensor, None]:
    """Writes the step's keys and values to the cache and attends to it.

    Args:
        module: The attention layer; its `layer_idx` selects the cache layer.
        query: ``[1, H, T, D]``, rotated.
        key: ``[1, K, T, D]``, rotated.
        value: Array of shape ``[1, K, T, D]``.
        attention_mask: None; the step has its own masks.
        step: Cache row and position of each token.
        sliding_window: Number of positions that a query sees, its own included; None: all.
        softcap: c, where a score is c tanh(x / c) of the scaled product x; None: x.

    Returns:
        ``[1, T, H, D]``, and None for the weights.
    """
    keys_RKND, values_RKND = step.cache.layer(int(module.layer_idx))  # type: ignore[arg-type]
    num_tokens = len(step.cache_rows)
    place = (step.cache_rows, slice(None), step.positions[:num_tokens])
    keys_RKND[place] = key[0, :, :num_tokens].transpose(0, 1)
    values_RKND[place] = value[0, :, :num_tokens].transpose(0, 1)
    query_THD = query[0].transpose(0, 1)
    parts = []
    for group in step.groups:
        held = (keys_RKND[group.rows], values_RKND[group.rows])
        keys, values = (x[:, :, : group.kv_length] for x in held)
        queries = query_THD[group.tokens]
        if sliding_window is not None or softcap is not None:
            group = replace(group, mask=group.unshared_mask(sliding_window), shared=0)
        if step.cache.shape.is_exact:
            parts.append(_attend_in_chunks(queries * scaling, keys, values, group, softcap))
        elif group.shared:
            parts.append(_attend_shared(queries, keys, values, scaling, group))
        else:
            parts.append(_attend(queries, keys, values, scaling, group, softcap))
    if step.padding:
        parts.append(parts[-1][-1:].expand(step.padding, -1, -1))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None


def _attend(
    query_THD: torch.Tensor,
    keys_RKND: torch.Tensor,
    values_RKND: torch.Tensor,
    scaling: float,
    group: _Group,
    softcap: float | None,
) -> torch.Tensor:
    """Returns the attention of one group, ``[number of its tokens, H, D]``.

    The G query heads of a key-value head are folded into the query axis, so that grouped
    heads need no repeated keys (Ainslie et al. 2023, arXiv 2305.13245).
    """
    num_rows, num_kv_heads = keys_RKND.shape[:2]
    num_heads, head_dim = query_THD.shape[1:]
    if group.scatter is None:
        padded_RQHD = query_THD.reshape(num_rows, group.num_queries, num_heads, head_dim)
    else:
        padded_RQHD = query_THD.new_zeros(num_rows, group.num_queries, num_heads, head_dim)
        padded_RQHD[group.scatter] = query_THD
    folded = padded_RQHD.transpose(1, 2).reshape(num_rows, num_kv_heads, -1, head_dim)
    if softcap is None:
        out = functional.scaled_dot_product_attention(
            folded, keys_RKND, values_RKND, attn_mask=group.mask, scale=scaling
        )
    else:
        products = (folded @ keys_RKND.transpose(2, 3)).float() * (scaling / softcap)
        weights = (products.tanh_().mul_(softcap) + group.mask).softmax(-1)
        out = weights.to(values_RKND.dtype) @ values_RKND
    out_RQHD = out.reshape(num_rows, num_heads, group.num_queries, head_dim).transpose(1, 2)
    if group.scatter is None:
        return out_RQHD.reshape(-1, num_heads, head_dim)
    return out_RQHD[group.scatter]


def _attend_shared(
    query_RHD: torch.Tensor,
    keys_RKND: torch.Tensor,
    values_RKND: torch.Tensor,
    scaling: float,
    group: _Group,
) -> torch.Tensor:
    """Returns the attention of decoding rows that share their first `group.shared` keys.

    Each row has one query. One softmax covers the scores of both parts, so no merge follows.
    """
    shared, (num_rows, num_kv_heads) = group.shared, keys_RKND.shape[:2]
    num_heads, head_dim = query_RHD.shape[1:]
    per_head = num_heads // num_kv_heads
    query_RKGD = query_RHD.reshape(num_rows, num_kv_heads, per_head, head_dim)
    together = (num_kv_heads, num_rows * per_head, -1)  # K, R * G, shared or D
    apart = (num_rows * num_kv_heads, per_head, -1)  # R * K, G, N or D

    query = query_RKGD.transpose(0, 1).reshape(together)
    scores = torch.bmm(query, keys_RKND[0, :, :shared].transpose(1, 2)).mul_(scaling)
    shared_scores = scores.view(num_kv_heads, num_rows, per_head, shared).transpose(0, 1)
    own_scores = torch.baddbmm(
        group.mask.expand(-1, num_kv_heads, -1, -1).flatten(0, 1),
        query_RKGD.reshape(apart),
        keys_RKND[:, :, shared:].flatten(0, 1).transpose(1, 2),
        alpha=scaling,
    )
    weights = torch.cat((shared_scores.reshape(apart), own_scores), dim=-1).softmax(-1)

    own = torch.bmm(weights[:, :, shared:], values_RKND[:, :, shared:].flatten(0, 1))
    weights_RKGS = weights[:, :, :shared].view(num_rows, num_kv_heads, per_head, shared)
    common = torch.bmm(weights_RKGS.transpose(0, 1).reshape(together), values_RKND[0, :, :shared])
    common_RKGD = common.view(num_kv_heads, num_rows, per_head, head_dim).transpose(0, 1)
    return (own.view_as(query_RKGD) + common_RKGD).reshape(query_RHD.shape)


def _attend_in_chunks(
    query_THD: torch.Tensor,
    keys_RKND: torch.Tensor,
    values_RKND: torch.Tensor,
    group: _Group,
    softcap: float | None = None,
) -> torch.Tensor:
    """Returns the attention of one group, ``[number of its tokens, H, D]``, exact to the bit.

    The queries are scaled. Those of shared positions are flat, and need no padding; one softmax
    covers the scores of both parts.
    """
    shared, num_kv_heads = group.shared, keys_RKND.shape[1]
    num_tokens, num_heads, head_dim = query_THD.shape
    query_TKGD = query_THD.reshape(num_tokens, num_kv_heads, -1, head_dim)
    padded = _padded(query_TKGD, group)  # [R * K, M, D], M >= 4
    keys = keys_RKND[:, :, shared:].flatten(0, 1).transpose(1, 2)
    mask = group.mask.expand(-1, num_kv_heads, -1, -1).flatten(0, 1)
    if mask.shape[1] > 1:
        mask = mask.repeat(1, padded.shape[1] // mask.shape[1], 1)
    if softcap is None:
        scores = torch.baddbmm(mask, padded, keys)
    else:
        scores = torch.bmm(padded, keys).div_(softcap).tanh_().mul_(softcap).add_(mask)
    if not shared:
        weights = scores.softmax(-1)
        out = _sum_of_chunks(None, weights, values_RKND.flatten(0, 1))
        return _flat(out, num_kv_heads, group).reshape(num_tokens, num_heads, head_dim)
    per_token = query_TKGD.shape[2]
    together = query_TKGD.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)  # [K, T * G, D]
    shared_scores = torch.bmm(together, keys_RKND[0, :, :shared].transpose(1, 2))
    shared_TKGS = shared_scores.view(num_kv_heads, num_tokens, per_token, -1).transpose(0, 1)
    weights_TKGN = torch.cat((shared_TKGS, _flat(scores, num_kv_heads, group)), -1).softmax(-1)
    shared_weights = weights_TKGN[..., :shared].transpose(0, 1).reshape(num_kv_heads, -1, shared)
    common = _sum_of_chunks(None, shared_weights, values_RKND[0, :, :shared])
    common_TKGD = common.view(num_kv_heads, num_tokens, per_token, head_dim).transpose(0, 1)
    own = values_RKND[:, :, shared:].flatten(0, 1)
    weights = _padded(weights_TKGN[..., shared:], group)
    out = _sum_of_chunks(_padded(common_TKGD, group), weights, own)
    return _flat(out, num_kv_heads, group).reshape(num_tokens, num_heads, head_dim)


def _sum_of_chunks(
    begun: torch.Tensor | None, weights: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Returns ``begun + weights @ values``, summed chunk by chunk; overwrites `begun`."""
    total = begun
    for first in range(0, weights.shape[-1], CHUNK):
        chunk = slice(first, first + CHUNK)
        if total is None:
            total = torch.bmm(weights[..., chunk], values[:, chunk])
        else:
            total.baddbmm_(weights[..., chunk], values[:, chunk])
    assert total is not None
    return total


def _padded(x_TKGC: torch.Tensor, group: _Group) -> torch.Tensor:
    """Returns ``[R * K, M, C]``: G * Q rows per row of the cache and head, repeated up to M."""
    num_kv_heads, per_token, size = x_TKGC.shape[1:]
    num_rows = group.rows.stop - group.rows.start
    if group.scatter is None:
        padded_RQKGC = x_TKGC.reshape(num_rows, -1, num_kv_heads, per_token, size)
    else:
        shape = (num_rows, group.num_queries, num_kv_heads, per_token, size)
        padded_RQKGC = x_TKGC.new_zeros(shape)
        padded_RQKGC[group.scatter] = x_TKGC
    padded = padded_RQKGC.permute(0, 2, 3, 1, 4).reshape(num_rows * num_kv_heads, -1, size)
    missing = -(-LEAST_ROWS // padded.shape[1])
    return padded if missing == 1 else padded.repeat(1, missing, 1)


def _flat(padded: torch.Tensor, num_kv_heads: int, group: _Group) -> torch.Tensor:
    """Returns ``[T, K, G, C]`` of ``[R * K, M, C]``."""
    per_token, size = group.queries_per_head, padded.shape[-1]
    used = padded[:, : per_token * group.num_queries]
    shape = (-1, num_kv_heads, per_token, group.num_queries, size)
    x_RQKGC = used.reshape(shape).permute(0, 3, 1, 2, 4)
    if group.scatter is None:
        return x_RQKGC.reshape(-1, num_kv_heads, per_token, size)
    return x_RQKGC[group.scatter]
