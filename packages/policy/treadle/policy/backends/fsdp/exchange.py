"""An exchange of rows between all ranks of a group, through which a gradient goes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Sizes = Sequence[int] | None


def exchanged(
    rows: Tensor, group: ProcessGroup, sent: Sizes = None, received: Sizes = None
) -> Tensor:
    """Returns what the ranks have sent to this one, in their order; collective.

    Args:
        rows: Rows for each rank, those of one after those of another.
        sent: Number of rows for each rank; None: equally many.
        received: Number of rows from each rank; None: as many as are sent.
    """
    found: Tensor = _Exchange.apply(rows, group, sent, received)  # type: ignore[no-untyped-call]
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: ProcessGroup, sent: Sizes, received: Sizes
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _exchange(rows, group, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient, ctx.group, ctx.received, ctx.sent), None, None, None


def _exchange(rows: Tensor, group: ProcessGroup, sent: Sizes, received: Sizes) -> Tensor:
    count = len(rows) if received is None else sum(received)
    found = rows.new_empty(count, *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found
