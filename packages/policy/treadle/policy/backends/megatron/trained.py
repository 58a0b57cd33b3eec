"""A model with its gradient and its optimizer: what the policy and its critic have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.policy.backends.megatron import checkpoint, device, pipeline, weights
from treadle.policy.backends.megatron.optimizer import PolicyOptimizer
from treadle.policy.backends.offload import Offload, offload_of
from treadle.policy.backends.trained import Trained

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from treadle.agent_loop import FloatArray
    from treadle.policy.backends.megatron.model import PolicyModel
    from treadle.policy.backends.megatron.packing import MicroBatch, MicroBatches
    from treadle.policy.backends.megatron.parallel import World
    from treadle.policy.config.policy import OffloadConfig


class TrainedModel(Trained):
    """See the module. A class that derives from it sets the attributes."""

    world: World
    _model: PolicyModel
    _net: DistributedDataParallel
    _optimizer: PolicyOptimizer

    def _offload_of(
        self, config: OffloadConfig, *, reference: Callable[[], Iterable[Tensor]] = tuple
    ) -> Offload:
        buffers = [*self._net.buffers, *self._net.expert_parallel_buffers]
        of_buffers = [b.param_data for b in buffers if b.param_data is not None]
        return offload_of(
            config,
            parameters=lambda: chain(self._net.parameters(), of_buffers),
            gradients=lambda: (buffer.grad_data for buffer in buffers),
            state=self._optimizer.tensors,
            reference=reference,
        )

    def evaluate(
        self,
        net: torch.nn.Module,
        micro_batches: MicroBatches,
        compute: Callable[[MicroBatch, Tensor], Tensor],
    ) -> list[FloatArray]:
        """Returns what is computed for the loss tokens of a batch, [L] of each sequence.

        Args:
            net: Module that the pipeline runs, without a gradient.
            compute: Makes the [T] values of a micro-batch and the last stage's hidden states.
        """
        packer = micro_batches.packer
        values_M = torch.zeros(packer.num_loss_tokens, device=device.device())

        def collect(micro: MicroBatch, hidden: Tensor) -> Tensor:
            values_T = compute(micro, hidden)
            if self.world.speaks:
                values_M[micro.slots_T] = values_T
            return values_T.sum()

        pipeline.run(net, micro_batches, collect, forward_only=True)
        dist.all_reduce(values_M)
        return packer.unpack(values_M.cpu().numpy())

    def accumulate(
        self, micro_batches: MicroBatches, loss: Callable[[MicroBatch, Tensor], Tensor]
    ) -> None:
        """Adds the gradient of a loss to that of the next step; see `pipeline.run`."""
        self._offload.restore("parameters", "gradients")
        if not self._has_gradient:
            self._net.zero_grad_buffer()
            self._optimizer.zero_grad()
            self._has_gradient = True
        pipeline.run(self._net, micro_batches, loss, forward_only=False)

    def _reduce_gradients(self) -> None:
        pipeline.reduce_gradients(self._net)

    def weights_are_finite(self) -> bool:
        """See `PolicyBackend.weights_are_finite`."""
        self._offload.restore("parameters")
        return weights.are_finite(self._model)

    def save(self, directory: Path) -> None:
        """See `PolicyBackend.save`."""
        checkpoint.save(self._state(), directory, step=self._step, world=self.world)

    def _read(self, directory: Path) -> int:
        return checkpoint.load(self._state(), directory)

    def _state(self) -> checkpoint.PolicyState:
        """Returns what a checkpoint has of it, on the device."""
        raise NotImplementedError
