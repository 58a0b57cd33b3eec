"""What the micro-batches of a model with experts need besides their rows.

Invariant: ranks that share experts run equally many micro-batches, as tokens travel between them in
every layer. A rank that has fewer gets blank ones: rows of a sequence without a loss token, in no
statistic and no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from treadle.trainer.policy.megatron import device

device.install()

from megatron.core import parallel_state  # noqa: E402

if TYPE_CHECKING:
    from treadle.trainer.policy.megatron.packing import MicroBatch
    from treadle.trainer.policy.megatron.parallel import World

_OF_LOSS_TOKENS = (
    *("predictors_K", "targets_K", "slots_T", "weights_T", "advantages_T", "stale_T"),
    *("rollout_logprobs_T", "old_logprobs_T", "ref_logprobs_T", "selected_T", "sample_lengths_S"),
)


def prepare(
    micro_batches: Sequence[MicroBatch], make: Callable[[], MicroBatch], world: World
) -> list[MicroBatch]:
    """Completes the routing of each micro-batch, and adds blank ones; collective.

    Args:
        micro_batches: This rank's; may be empty.
        make: Returns any micro-batch, to make a blank one from.
        world: This rank's position.
    """
    rows = sum(micro.segments.routing.num_rows for micro in micro_batches)
    most = len(micro_batches)
    if world.data > 1:
        group = parallel_state.get_data_parallel_group()
        sums, count = torch.tensor([[rows], [most]], device=device.device())
        dist.all_reduce(sums, group=group)
        dist.all_reduce(count, dist.ReduceOp.MAX, group=group)
        rows, most = int(sums), int(count)
    for micro in micro_batches:
        routing = micro.segments.routing
        micro.segments.routing = replace(routing, share=routing.num_rows / rows)
    lacking = most - len(micro_batches) if world.expert > 1 else 0
    return [*micro_batches, *(_blank(make()) for _ in range(lacking))]


def _blank(micro: MicroBatch) -> MicroBatch:
    """Returns the micro-batch without its loss tokens, all rows of which count as padding."""
    nothing = torch.zeros(micro.num_rows, dtype=torch.bool, device=micro.ids_1P.device)
    micro.segments.routing = replace(micro.segments.routing, real_P=nothing, num_rows=0)
    values = {name: getattr(micro, name) for name in _OF_LOSS_TOKENS}
    spread = micro.spread
    if spread is not None:
        spread = replace(spread, count=0, index_K=spread.index_K[:0])
    return replace(
        micro, spread=spread, **{n: v if v is None else v[:0] for n, v in values.items()}
    )
