"""Token log-probabilities and entropies from logits, of which ranks may hold some columns each.

Shape suffixes: T tokens, V columns of the vocabulary on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def from_logits(
    logits_TV: Tensor, targets_T: Tensor, *, vocab_size: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Returns the same from logits, of which each rank of the group holds its own columns."""
    result: tuple[Tensor, Tensor] = _LogprobEntropy.apply(  # type: ignore[no-untyped-call]
        logits_TV, targets_T, vocab_size, group
    )
    return result


class _LogprobEntropy(torch.autograd.Function):
    """One pass over the logits and two all-reduces, forward; none backward."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        columns = logits_TV.shape[-1]
        first = columns * (0 if group is None else group.rank())
        real = min(max(vocab_size - first, 0), columns)
        x_TV = logits_TV.float()
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
    ) -> tuple[Tensor, None, None, None]:
        """By d log p/d x_j = [j is target] - p_j and d H/d x_j = -p_j (log p_j + H)."""
        logprob_TV, entropy_T, index_T1, here_T = ctx.saved_tensors
        p_TV = logprob_TV.exp()
        grad_TV = p_TV * -grad_logprob_T[:, None]
        if grad_entropy_T.any():
            real = ctx.real
            spread_TV = logprob_TV[:, :real] + entropy_T[:, None]
            grad_TV[:, :real] -= p_TV[:, :real] * spread_TV * grad_entropy_T[:, None]
        grad_TV.scatter_add_(-1, index_T1, torch.where(here_T, grad_logprob_T, 0.0)[:, None])
        return grad_TV.to(ctx.dtype), None, None, None
