"""The way of micro-batches through a model that its pipeline stages share.

Invariant: after `reduce_gradients` the gradient is the plain sum over the micro-batches of all runs
since it was 0, over data-parallel and context ranks. The model is the policy or its critic; both
are on the same ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.policy.backends.megatron import device

device.install()

from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

if TYPE_CHECKING:
    from treadle.policy.backends.megatron.model import PolicyModel
    from treadle.policy.backends.megatron.packing import MicroBatch, MicroBatches


def wrap(model: PolicyModel, *, distributed_optimizer: bool) -> DistributedDataParallel:
    """Megatron's gradient buffers; they sum in float32 and are reduced once per step."""
    return DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=distributed_optimizer,
        ),
        model,
    )


def reduce_gradients(net: DistributedDataParallel) -> None:
    """Sums the gradient over ranks; once per step, because a second sum would count it again."""
    finalize_model_grads([net], None)  # None: do not divide by a token count


def run(
    net: torch.nn.Module,
    micro_batches: MicroBatches,
    loss: Callable[[MicroBatch, Tensor], Tensor],
    *,
    forward_only: bool,
) -> None:
    """Takes the micro-batches through the pipeline; gradients stay on each rank.

    Args:
        net: From `wrap`; without a gradient also a model as it is.
        micro_batches: This data-parallel rank's share; may be empty.
        loss: Makes the weighted loss of a micro-batch and the last stage's hidden states.
    """
    if not micro_batches:  # the schedules need one
        return

    def forward(batches: Iterator[MicroBatch], net: torch.nn.Module) -> Any:
        micro = next(batches)
        hidden = net(micro.ids_1P, micro.positions_P, micro.segments)
        nothing = torch.zeros((), dtype=torch.int)  # Megatron is not to normalise again
        return hidden, lambda hidden: (loss(micro, hidden), nothing, None)

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(micro_batches),
        model=[net],
        num_microbatches=len(micro_batches),
        seq_length=1,  # ignored: each micro-batch has its own (variable_seq_lengths)
        micro_batch_size=1,
        forward_only=forward_only,
    )
