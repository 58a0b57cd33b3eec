"""The loss tokens of a micro-batch whose rows are spread over a context group.

Invariant: what `of_all_ranks` returns is the same on every rank, and so is any loss of it.
Backward, a rank takes the gradient of its own tokens, unsummed: the sum of the ranks' gradients is
that of the loss, counted once.

Shape suffixes: T loss tokens, K those whose predictors are among this rank's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """Which loss tokens this rank computes.

    Attributes:
        index_K: Which of the T are this rank's.
    """

    group: ProcessGroup
    count: int
    index_K: Tensor

    def of_all_ranks(self, values_K: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns for each tensor [K] of this rank the [T] of all ranks; collective."""
        whole_TX: Tensor = _Gather.apply(torch.stack(list(values_K), 1), self)  # type: ignore[no-untyped-call]
        return whole_TX.unbind(1)


class _Gather(torch.autograd.Function):
    """The values of all ranks: each is on one of them."""

    @staticmethod
    def forward(ctx: Any, values_KX: Tensor, tokens: LossTokens) -> Tensor:
        ctx.tokens = tokens
        whole_TX = values_KX.new_zeros(tokens.count, values_KX.shape[1])
        whole_TX.index_copy_(0, tokens.index_K, values_KX)
        dist.all_reduce(whole_TX, group=tokens.group)
        return whole_TX

    @staticmethod
    def backward(ctx: Any, grad_TX: Tensor) -> tuple[Tensor, None]:
        return grad_TX.index_select(0, ctx.tokens.index_K), None
