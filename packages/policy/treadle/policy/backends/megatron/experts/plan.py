"""The micro-batches of a model with experts: what they need besides their rows.

Invariant: ranks that share experts run equally many micro-batches, as tokens travel between them in
every layer. A rank that has fewer gets blank ones: rows of a sequence without a loss token, in no
statistic and no loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from treadle.policy.backends.megatron import device
from treadle.policy.backends.megatron.packing import MicroBatches

device.install()

from megatron.core import parallel_state  # noqa: E402

if TYPE_CHECKING:
    from treadle.policy.backends.megatron.packing import MicroBatch
    from treadle.policy.backends.megatron.parallel import World

_OF_LOSS_TOKENS = (
    *("predictors_K", "targets_K", "slots_T", "weights_T", "advantages_T", "stale_T"),
    *("rollout_logprobs_T", "old_logprobs_T", "ref_logprobs_T", "selected_T", "sample_lengths_S"),
)


class RoutedMicroBatches(MicroBatches):
    """Micro-batches of a model with experts: each has its weight in the load-balancing loss."""

    def __init__(self, micro_batches: MicroBatches, *, rows: int, num_blank: int) -> None:
        """Makes nothing yet.

        Args:
            num_blank: How many blank ones come last.
        """
        super().__init__(micro_batches.packer, micro_batches.parts)
        self._rows = rows
        self._num_blank = num_blank

    def __len__(self) -> int:
        return super().__len__() + self._num_blank

    def __iter__(self) -> Iterator[MicroBatch]:
        for micro in super().__iter__():
            routing = micro.segments.routing
            micro.segments.routing = replace(routing, share=routing.num_rows / self._rows)
            yield micro
        for _ in range(self._num_blank):
            yield _blank(self.packer.blank())


def prepare(micro_batches: MicroBatches, world: World) -> RoutedMicroBatches:
    """Completes the micro-batches of this data-parallel rank, which may be none; collective."""
    rows, most = micro_batches.num_rows, len(micro_batches)
    if world.data > 1:
        group = parallel_state.get_data_parallel_group()
        sums, count = torch.tensor([[rows], [most]], device=device.device())
        dist.all_reduce(sums, group=group)
        dist.all_reduce(count, dist.ReduceOp.MAX, group=group)
        rows, most = int(sums), int(count)
    lacking = most - len(micro_batches) if world.expert > 1 else 0
    return RoutedMicroBatches(micro_batches, rows=rows, num_blank=lacking)


def _blank(micro: MicroBatch) -> MicroBatch:
    """Returns the micro-batch without its loss tokens, all rows of which count as padding."""
    nothing = torch.zeros(micro.num_rows, dtype=torch.bool, device=micro.ids_1P.device)
    micro.segments.routing = replace(
        micro.segments.routing, real_P=nothing, num_rows=0, indices_PLK=None
    )
    values = {name: getattr(micro, name) for name in _OF_LOSS_TOKENS}
    none: dict[str, Any] = {n: v if v is None else v[:0] for n, v in values.items()}
    spread = micro.spread
    if spread is not None:
        spread = replace(spread, count=0, index_K=spread.index_K[:0])
    return replace(micro, spread=spread, **none)
