"""Attention over a tree of prefixes: each row sees its ancestors and itself.

A row's context is cut into pieces, each of which one kernel call computes for many rows: the row's
own run, causally (runs of similar length together), and each run above it, whole (all rows that
continue the run together, so that its keys are read once and never copied). A kernel returns, next
to its output o_i, the logarithm l_i of the sum of exp(score) over its keys, and the pieces join to

    l = log sum_i exp(l_i),    o = sum_i exp(l_i - l) o_i

(flash attention's rule for blocks, arXiv:2205.14135, section 3.1). Backwards, a kernel that is
given the joint o and l returns the exact gradient of its piece, and pieces are summed
(arXiv:2310.01889, where the blocks lie on different devices). No mask exists anywhere, and memory
is linear in the rows. The order of the pieces is fixed, so the result is bitwise the same each time
on a CPU.

Shape suffixes: P packed rows, N runs of a group, S rows of its longest, A heads, B key and value
heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from treadle.policy.backends.megatron.attention import ScoreRule, Segments, end_of_group
from treadle.policy.backends.megatron.prefixes.tree import RowRun, runs_of

_QUERIES_AT_ONCE: Final = 1024
"""Queries whose scores exist at a time where there is no kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGroup:
    """Runs of similar length, padded at their ends to the longest."""

    count: int
    longest: int
    source_NS: Tensor
    """[N * S] the row of each padded place; the run's last row in the padding, so that the padding
    has finite scores."""
    rows: Tensor
    """The rows of all its runs."""
    slots: Tensor | None
    """Where each of `rows` is among the padded places; None without padding."""
    padding: Tensor | None
    """The places that are padding."""

    def spread(self, x_PAD: Tensor, *, is_gradient: bool = False) -> Tensor:
        """[P, A, D] -> [N, A, S, D]; a gradient is 0 in the padding."""
        taken = x_PAD.index_select(0, self.source_NS)
        if is_gradient and self.padding is not None:
            taken.index_fill_(0, self.padding, 0.0)
        return taken.view(self.count, self.longest, *x_PAD.shape[1:]).transpose(1, 2)

    def put(self, into_PAD: Tensor, x_NASD: Tensor) -> None:
        """Writes what was computed for the padded places to the rows."""
        flat = x_NASD.transpose(1, 2).reshape(self.count * self.longest, *into_PAD.shape[1:])
        if self.slots is not None:
            flat = flat.index_select(0, self.slots)
        into_PAD.index_copy_(0, self.rows, flat.to(into_PAD.dtype))


@dataclass(frozen=True, slots=True)
class Above:
    """Keys that some queries see whole."""

    queries: slice
    keys: slice


@dataclass
class TreeSegments(Segments):
    """The segments that Megatron hands through unread, for a micro-batch with prefixes."""

    own: tuple[RunGroup, ...] = ()
    above: tuple[Above, ...] = ()
    """The runs that others continue, with the rows of those."""

    @classmethod
    def of_tree(
        cls, lengths: Sequence[int], overlaps: Sequence[int], at: torch.device
    ) -> TreeSegments:
        """Args are those of `runs_of`."""
        runs = runs_of(lengths, overlaps)
        return cls(
            qkv_format="sbhd",
            own=tuple(groups_of(runs, at)),
            above=tuple(
                Above(slice(run.stop, run.end), slice(run.start, run.stop))
                for run in runs
                if run.end > run.stop
            ),
        )

    def attend(self, joined_PHD: Tensor, heads: Sequence[int], scores: ScoreRule) -> Tensor:
        """Attends along the path of each row; returns [P, A * D], zeros in the padding.

        The layer has no window and its scores no cap: nothing is shared where one has.
        """
        assert scores.window is None and scores.softcap is None
        out: Tensor = _TreeAttention.apply(  # type: ignore[no-untyped-call]
            *joined_PHD.split(heads, 1), self, scores.scale
        )
        return out.flatten(1)

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values that the ranges of `above` count: here this rank's rows."""
        return key, value

    def reduce(self, grads: Tensor) -> Tensor:
        """Returns this rank's rows of [P, 2, B, D] gradients of what `gather` returned.

        Not called where that is what it was given.
        """
        raise NotImplementedError


def groups_of(runs: Sequence[RowRun], at: torch.device) -> Iterator[RunGroup]:
    """Yields runs of similar length together, padded."""
    by_length = sorted(runs, key=lambda run: run.stop - run.start)  # stable: by row where equal
    lengths = [run.stop - run.start for run in by_length]
    first = 0
    while first < len(lengths):
        last = end_of_group(lengths, first)
        longest = lengths[last - 1]
        source: list[int] = []
        slots: list[int] = []
        for run in by_length[first:last]:
            slots += range(len(source), len(source) + run.stop - run.start)
            source += range(run.start, run.stop)
            source += [run.stop - 1] * (longest - (run.stop - run.start))
        padded = len(slots) < len(source)
        padding = sorted(set(range(len(source))) - set(slots)) if padded else []
        yield RunGroup(
            count=last - first,
            longest=longest,
            source_NS=torch.tensor(source, device=at),
            rows=torch.tensor([source[slot] for slot in slots], device=at),
            slots=torch.tensor(slots, device=at) if padded else None,
            padding=torch.tensor(padding, device=at) if padded else None,
        )
        first = last


class _TreeAttention(torch.autograd.Function):
    """All pieces, joined; see the module docstring."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: TreeSegments, scale: float
    ) -> Tensor:
        out_PAD = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        lse_PA = torch.zeros(query.shape[:2], dtype=torch.float32, device=query.device)
        for group in tree.own:
            out, lse = _forward(
                group.spread(query), group.spread(key), group.spread(value), True, scale
            )
            group.put(out_PAD, out)
            group.put(lse_PA, lse)
        keys, values = tree.gather(key, value)
        for run in tree.above:
            out, lse = _forward(
                _heads_first(query[run.queries]),
                _heads_first(keys[run.keys]),
                _heads_first(values[run.keys]),
                False,
                scale,
            )
            _join(out_PAD[run.queries], lse_PA[run.queries], out[0], lse[0])
        result = out_PAD.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse_PA)
        ctx.tree, ctx.scale = tree, scale
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, lse = ctx.saved_tensors
        tree, scale = ctx.tree, ctx.scale
        grads = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
        for group in tree.own:
            parts = _backward(
                group.spread(grad, is_gradient=True),
                group.spread(query),
                group.spread(key),
                group.spread(value),
                group.spread(out),
                group.spread(lse),
                True,
                scale,
            )
            for into, part in zip(grads, parts, strict=True):
                group.put(into, part)
        keys, values = tree.gather(key, value)
        above, gathered = grads[1:], None
        if keys is not key:
            gathered = key.new_zeros(len(keys), 2, *key.shape[1:], dtype=torch.float32)
            above = list(gathered.unbind(1))
        for run in tree.above:
            parts = _backward(
                _heads_first(grad[run.queries]),
                _heads_first(query[run.queries]),
                _heads_first(keys[run.keys]),
                _heads_first(values[run.keys]),
                _heads_first(out[run.queries]),
                _heads_first(lse[run.queries]),
                False,
                scale,
            )
            for into, part, rows in zip(
                (grads[0], *above), parts, (run.queries, run.keys, run.keys), strict=True
            ):
                into[rows] += part[0].transpose(0, 1)
        if gathered is not None:
            for into, part in zip(grads[1:], tree.reduce(gathered).unbind(1), strict=True):
                into += part
        q, k, v = (g.to(x.dtype) for g, x in zip(grads, (query, key, value), strict=True))
        return q, k, v, None, None


def _heads_first(x_PAD: Tensor) -> Tensor:
    """[P, A, D] -> [1, A, P, D], a view."""
    return x_PAD.transpose(0, 1)[None]


def _join(out_PAD: Tensor, lse_PA: Tensor, more_APD: Tensor, more_AP: Tensor) -> None:
    """Adds one more piece of the context to some rows, in place."""
    more_PA = more_AP.transpose(0, 1)
    joint_PA = torch.logaddexp(lse_PA, more_PA)
    out_PAD *= (lse_PA - joint_PA).exp()[..., None]
    out_PAD += more_APD.transpose(0, 1) * (more_PA - joint_PA).exp()[..., None]
    lse_PA.copy_(joint_PA)


# --- one piece -----------------------------------------------------------------------------------


def _forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns [N, A, S, D] outputs and [N, A, S] logarithms of the sums of exp(score)."""
    if query.device.type != "cpu":
        return plain_forward(query, key, value, causal, scale)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, scale=scale
    )
    return out, lse


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value through this piece.

    Args:
        grad: [N, A, S, D] of the joint output.
        query: Array of shape [N, A, S, D].
        key: Array of shape [N, B, K, D].
        value: Array of shape [N, B, K, D].
        out: [N, A, S, D], of all pieces together.
        lse: [N, A, S], of all pieces together.
        causal: Whether a query sees the keys up to its own place only.
    """
    if query.device.type != "cpu":
        return plain_backward(grad, query, key, value, out, lse, causal, scale)
    parts: tuple[Tensor, Tensor, Tensor] = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, causal, scale=scale
        )
    )
    return parts


def plain_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The forward kernel where torch has none with this interface: matrix products, in blocks."""
    keys, values = _per_query_head(query, key), _per_query_head(query, value)
    outs, lses = [], []
    for first in range(0, query.shape[2], _QUERIES_AT_ONCE):
        scores = _scores(query, keys, first, causal, scale)
        lse = scores.logsumexp(-1)
        outs.append((scores - lse[..., None]).exp().to(values.dtype) @ values)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def plain_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward kernel to `plain_forward`; see `_backward`."""
    keys, values = _per_query_head(query, key), _per_query_head(query, value)
    grad_query = []
    grad_key, grad_value = torch.zeros_like(keys), torch.zeros_like(values)
    delta = (grad.float() * out.float()).sum(-1)
    for first in range(0, query.shape[2], _QUERIES_AT_ONCE):
        block = slice(first, first + _QUERIES_AT_ONCE)
        scores = _scores(query, keys, first, causal, scale)
        p = (scores - lse[:, :, block, None]).exp()
        grad_p = (grad[:, :, block] @ values.transpose(2, 3)).float()
        grad_scores = (p * (grad_p - delta[:, :, block, None]) * scale).to(query.dtype)
        grad_query.append(grad_scores @ keys)
        grad_key += grad_scores.transpose(2, 3) @ query[:, :, block]
        grad_value += p.to(grad.dtype).transpose(2, 3) @ grad[:, :, block]
    per_head = (key.shape[0], key.shape[1], -1, *key.shape[2:])
    return (
        torch.cat(grad_query, 2),
        grad_key.view(per_head).sum(2),
        grad_value.view(per_head).sum(2),
    )


def _per_query_head(query: Tensor, x: Tensor) -> Tensor:
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _scores(query: Tensor, keys: Tensor, first: int, causal: bool, scale: float) -> Tensor:
    """Returns the scores of a block of queries, float32, minus infinity where it may not see."""
    block = query[:, :, first : first + _QUERIES_AT_ONCE]
    scores = (block @ keys.transpose(2, 3)).float() * scale
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril(first)
        scores.masked_fill_(~seen, float("-inf"))
    return scores
