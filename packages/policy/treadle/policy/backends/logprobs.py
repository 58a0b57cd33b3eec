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

from treadle.policy.backends.description import NUMBERS_AT_ONCE
from treadle.policy.backends.fused import fused
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
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Returns the [T] log-probabilities and entropies; a rank of the group has its own columns.

    Args:
        masks: Sampling masks of the targets; the distribution is over the ids that they keep, with
            the gradient of that. Empty: over all ids.
        temperature: Logits are divided by it, in float32.
    """
    dropped_TV = None
    if masks:
        first = logits_TV.shape[-1] * (0 if group is None else group.rank())
        dropped_TV = _dropped(masks, targets_T, vocab_size, first, logits_TV.shape[-1])
    result: tuple[Tensor, Tensor] = _LogprobEntropy.apply(  # type: ignore[no-untyped-call]
        logits_TV, targets_T, dropped_TV, vocab_size, group, temperature
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
    index_T1 = own_T.clamp(0, columns - 1)[:, None]
    dropped_TV.scatter_(1, index_T1, dropped_TV.gather(1, index_T1) & ~here_T[:, None])
    return dropped_TV


def _float(logits_TV: Tensor, dropped_TV: Tensor | None, real: int, temperature: float) -> Tensor:
    """Returns a copy in float32, divided by the temperature, of what takes part."""
    x_TV = logits_TV.float()
    if temperature != 1.0:
        x_TV = x_TV / temperature
    if dropped_TV is not None:
        x_TV = x_TV.masked_fill(dropped_TV, _DROPPED)
    if real < x_TV.shape[-1]:
        x_TV = x_TV.clone() if x_TV is logits_TV else x_TV
        x_TV[:, real:] = float("-inf")
    return x_TV


@fused
def _largest(logits_TV: Tensor, dropped_TV: Tensor | None, real: int, temperature: float) -> Tensor:
    return _float(logits_TV, dropped_TV, real, temperature).amax(-1)


@fused
def _sums(
    logits_TV: Tensor,
    dropped_TV: Tensor | None,
    max_T: Tensor,
    index_T1: Tensor,
    here_T: Tensor,
    real: int,
    temperature: float,
) -> Tensor:
    """Returns the [3, T] sums of exp(x), of exp(x) x, and x of the target, less the largest."""
    shifted_TV = _float(logits_TV, dropped_TV, real, temperature) - max_T[:, None]
    exp_TV = shifted_TV.exp()
    # Of the logits themselves, so that a compiler need not write the float32 numbers to memory.
    target_T = logits_TV.gather(-1, index_T1)[:, 0].float()
    if temperature != 1.0:
        target_T = target_T / temperature
    target_T = torch.where(here_T, target_T - max_T, 0.0)
    # exp is 0 in padded columns, where shifted is -inf: only real columns are multiplied.
    weighted_T = (exp_TV[:, :real] * shifted_TV[:, :real]).sum(-1)
    return torch.stack([exp_TV.sum(-1), weighted_T, target_T])


@fused
def _gradient(
    logits_TV: Tensor,
    dropped_TV: Tensor | None,
    index_T1: Tensor,
    of_rows_6T: Tensor,
    real: int,
    temperature: float,
    with_entropy: bool,
) -> Tensor:
    """By d log p/d x_j = [j is target] - p_j and d H/d x_j = -p_j (log p_j + H)."""
    max_T, log_total_T, entropy_T, grad_target_T, grad_T, grad_entropy_T = of_rows_6T.unbind()
    logprob_TV = _float(logits_TV, dropped_TV, real, temperature) - max_T[:, None]
    logprob_TV = logprob_TV - log_total_T[:, None]
    p_TV = logprob_TV.exp()
    grad_TV = p_TV * -grad_T[:, None]
    if with_entropy:
        spread_TV = logprob_TV[:, :real] + entropy_T[:, None]
        grad_TV[:, :real] -= p_TV[:, :real] * spread_TV * grad_entropy_T[:, None]
    if logits_TV.is_cuda:  # for the same reason
        is_target_TV = torch.arange(logits_TV.shape[-1], device=logits_TV.device) == index_T1
        grad_TV = grad_TV + torch.where(is_target_TV, grad_target_T[:, None], 0.0)
    else:
        grad_TV.scatter_add_(-1, index_T1, grad_target_T[:, None])
    if temperature != 1.0:
        grad_TV = grad_TV / temperature
    typed_TV: Tensor = grad_TV.to(logits_TV.dtype)
    return typed_TV


class _LogprobEntropy(torch.autograd.Function):
    """Two all-reduces, forward; none backward. Keeps the logits, and numbers of their rows.

    float32 numbers of the logits' size do not exist: on a GPU they stay in the kernel, and on a CPU
    some rows are computed at a time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        dropped_TV: Tensor | None,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        columns = logits_TV.shape[-1]
        first = columns * (0 if group is None else group.rank())
        real = min(max(vocab_size - first, 0), columns)
        blocks = _blocks(logits_TV, dropped_TV)
        max_T = torch.cat([_largest(*block, real, temperature) for block in blocks])
        if group is not None:
            dist.all_reduce(max_T, dist.ReduceOp.MAX, group=group)
        local_T = targets_T - first
        here_T = (local_T >= 0) & (local_T < columns)
        index_T1 = local_T.clamp(0, columns - 1)[:, None]
        count = len(blocks)
        of_rows = zip(*(x.tensor_split(count) for x in (max_T, index_T1, here_T)), strict=True)
        parts = [
            _sums(logits, dropped, largest, index, here, real, temperature)
            for (logits, dropped), (largest, index, here) in zip(blocks, of_rows, strict=True)
        ]
        sums = torch.cat(parts, -1)
        if group is not None:
            dist.all_reduce(sums, group=group)
        total_T, weighted_T, target_T = sums
        log_total_T = total_T.log()
        entropy_T = log_total_T - weighted_T / total_T
        of_rows_T = max_T, log_total_T, entropy_T, index_T1, here_T
        ctx.save_for_backward(logits_TV, dropped_TV, *of_rows_T)
        ctx.real, ctx.temperature = real, temperature
        ctx.set_materialize_grads(False)  # a loss without the entropy gives it none
        return target_T - log_total_T, entropy_T

    @staticmethod
    def backward(
        ctx: Any, grad_logprob_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Computes the probabilities again, from the logits."""
        logits_TV, dropped_TV, max_T, log_total_T, entropy_T, index_T1, here_T = ctx.saved_tensors
        if grad_logprob_T is None:
            grad_logprob_T = torch.zeros_like(max_T)
        of_target_T = torch.where(here_T, grad_logprob_T, 0.0)
        of_entropy_T = torch.zeros_like(max_T) if grad_entropy_T is None else grad_entropy_T
        of_rows = torch.stack(
            (max_T, log_total_T, entropy_T, of_target_T, grad_logprob_T, of_entropy_T)
        )
        blocks = _blocks(logits_TV, dropped_TV)
        parts = [
            _gradient(*block, index, rows, ctx.real, ctx.temperature, grad_entropy_T is not None)
            for block, index, rows in zip(
                blocks,
                index_T1.tensor_split(len(blocks)),
                of_rows.tensor_split(len(blocks), -1),
                strict=True,
            )
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0], None, None, None, None, None


def _blocks(logits_TV: Tensor, dropped_TV: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    """Returns parts of some rows each; on a GPU one of all rows."""
    on_cpu = logits_TV.device.type == "cpu"
    count = max(1, logits_TV.numel() // NUMBERS_AT_ONCE) if on_cpu else 1
    parts = logits_TV.tensor_split(count)
    count = len(parts)
    return list(
        zip(
            parts,
            [None] * count if dropped_TV is None else dropped_TV.tensor_split(count),
            strict=True,
        )
    )
