"""Token log-probabilities and entropies from logits, of which ranks may hold some columns each.

Shape suffixes: T tokens, V columns of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from treadle.policy.client.sampling_masks import decode

_DROPPED = -1e30  # As good as minus infinity, but 0 times it is 0.


def in_chunks(
    compute: Callable[[Tensor, Tensor, Sequence[bytes]], tuple[Tensor, Tensor]],
    rows_TH: Tensor,
    targets_T: Tensor,
    masks: Sequence[bytes],
    *,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Returns what `compute` makes of rows; many are computed again in the backward pass.

    Args:
        masks: Sampling masks of the targets, or none.
        chunk: Most rows of logits to hold at a time.
    """
    if len(targets_T) <= chunk:
        return compute(rows_TH, targets_T, masks)
    parts = [
        checkpoint(
            compute,
            rows_TH[first : first + chunk],
            targets_T[first : first + chunk],
            masks[first : first + chunk],
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for first in range(0, len(targets_T), chunk)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def from_logits(
    logits_TV: Tensor,
    targets_T: Tensor,
    masks: Sequence[bytes] = (),
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Returns the [T] log-probabilities and entropies; a rank of the group has its own columns.

    Args:
        masks: Sampling masks of the targets; the distribution is over the ids that they keep, with
            the gradient of that. Empty: over all ids.
    """
    dropped_TV = None
    if masks:
        first = logits_TV.shape[-1] * (0 if group is None else group.rank())
        dropped_TV = _dropped(masks, targets_T, vocab_size, first, logits_TV.shape[-1])
    result: tuple[Tensor, Tensor] = _LogprobEntropy.apply(  # type: ignore[no-untyped-call]
        logits_TV, targets_T, dropped_TV, vocab_size, group
    )
    return result


def _dropped(
    masks: Sequence[bytes], targets_T: Tensor, vocab_size: int, first: int, columns: int
) -> Tensor:
    """Returns which of the columns from `first` on the masks leave out, [T, V]."""
    kept = decode(masks, vocab_size)
    here_N = (kept.ids_N >= first) & (kept.ids_N < first + columns)
    at = targets_T.device
    rows_N, ids_N, whole_T = (
        torch.from_numpy(each).to(at)
        for each in (kept.rows_N[here_N], kept.ids_N[here_N] - first, kept.whole_T)
    )
    dropped_TV = (~whole_T)[:, None].repeat(1, columns)
    dropped_TV[rows_N, ids_N] = False
    own_T = targets_T - first
    here_T = (own_T >= 0) & (own_T < columns)
    dropped_TV[here_T.nonzero()[:, 0], own_T[here_T]] = False
    return dropped_TV


class _LogprobEntropy(torch.autograd.Function):
    """One pass over the logits and two all-reduces, forward; none backward."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        dropped_TV: Tensor | None,
        vocab_size: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        columns = logits_TV.shape[-1]
        first = columns * (0 if group is None else group.rank())
        real = min(max(vocab_size - first, 0), columns)
        x_TV = logits_TV.float()
        if dropped_TV is not None:
            x_TV = x_TV.masked_fill(dropped_TV, _DROPPED)
        if real < columns:
            x_TV = x_TV.clone() if x_TV is logits_TV else x_TV
            x_TV[:, real:] = float("-inf")
        max_T = x_TV.amax(-1)
        if group is not None:
            dist.all_reduce(max_T, dist.ReduceOp.MAX, group=group)
        shifted_TV = x_TV - max_T[:, None]
        exp_TV = shifted_TV.exp()
        local_T = targets_T - first
        here_T = (local_T >= 0) & (local_T < columns)
        index_T1 = local_T.clamp(0, columns - 1)[:, None]
        target_T = torch.where(here_T, shifted_TV.gather(-1, index_T1)[:, 0], 0.0)
        # exp is 0 in padded columns, where shifted is -inf: only real columns are multiplied.
        weighted_T = (exp_TV[:, :real] * shifted_TV[:, :real]).sum(-1)
        sums = torch.stack([exp_TV.sum(-1), weighted_T, target_T])
        if group is not None:
            dist.all_reduce(sums, group=group)
        total_T, weighted_T, target_T = sums
        log_total_T = total_T.log()
        entropy_T = log_total_T - weighted_T / total_T
        logprob_TV = shifted_TV.sub_(log_total_T[:, None])
        ctx.save_for_backward(logprob_TV, entropy_T, index_T1, here_T)
        ctx.dtype, ctx.real = logits_TV.dtype, real
        return target_T - log_total_T, entropy_T

    @staticmethod
    def backward(
        ctx: Any, grad_logprob_T: Tensor, grad_entropy_T: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        """By d log p/d x_j = [j is target] - p_j and d H/d x_j = -p_j (log p_j + H)."""
        logprob_TV, entropy_T, index_T1, here_T = ctx.saved_tensors
        p_TV = logprob_TV.exp()
        grad_TV = p_TV * -grad_logprob_T[:, None]
        if grad_entropy_T.any():
            real = ctx.real
            spread_TV = logprob_TV[:, :real] + entropy_T[:, None]
            grad_TV[:, :real] -= p_TV[:, :real] * spread_TV * grad_entropy_T[:, None]
        grad_TV.scatter_add_(-1, index_T1, torch.where(here_T, grad_logprob_T, 0.0)[:, None])
        return grad_TV.to(ctx.dtype), None, None, None, None
