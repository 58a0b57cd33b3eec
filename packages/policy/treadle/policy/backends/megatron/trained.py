"""A model with its gradient and its optimizer: what the policy and its critic have in common.

Between calls it holds parameters, optimizer state and, after `accumulate`, a gradient. What
`policy.offload` takes off the device is restored by the call that needs it, and leaves at
`release_memory`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.policy.backend import CheckpointError
from treadle.policy.backends.megatron import checkpoint, device, pipeline, weights
from treadle.policy.backends.megatron.optimizer import PolicyOptimizer
from treadle.policy.client.types import OptimizerStats
from treadle.policy.rank_time import spent_on

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from treadle.agent_loop import FloatArray
    from treadle.policy.backends.megatron.model import PolicyModel
    from treadle.policy.backends.megatron.offload import Offload
    from treadle.policy.backends.megatron.packing import MicroBatch, MicroBatches
    from treadle.policy.backends.megatron.parallel import World
    from treadle.policy.client.types import OffloadReport
    from treadle.policy.config.policy import AdamSettings, OptimizerConfig


class TrainedModel:
    """See the module. A class that derives from it sets the attributes."""

    world: World
    _model: PolicyModel
    _net: DistributedDataParallel
    _optimizer: PolicyOptimizer
    _offload: Offload
    _settings: OptimizerConfig
    _step = 0
    _has_gradient = False

    @property
    def step(self) -> int:
        """Optimizer steps taken, skipped ones included."""
        return self._step

    def release_memory(self) -> None:
        """Takes off the device what `policy.offload` says, until a method needs it."""
        self._offload.release_all(keep_gradients=self._has_gradient)

    def take_offload_report(self) -> OffloadReport:
        """Returns what `policy.offload` has moved since the last report."""
        return self._offload.take_report()

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

    def optimizer_step(self, settings: AdamSettings | None = None) -> OptimizerStats:
        """See `PolicyBackend.optimizer_step`."""
        if not self._has_gradient:
            raise RuntimeError("there is no gradient: call forward_backward before optimizer_step")
        self._has_gradient = False
        self._offload.restore("parameters", "gradients")
        pipeline.reduce_gradients(self._net)
        settings = settings or self._settings.at_step(self._step)
        self._offload.restore("optimizer")
        with spent_on("optimizer"):
            norm, applied = self._optimizer.apply(settings)
        self._offload.release("optimizer")
        self._step += 1
        return OptimizerStats(
            step=self._step, grad_norm=norm, skipped=not applied, learning_rate=settings.lr
        )

    def weights_are_finite(self) -> bool:
        """Returns whether no weight is infinite or NaN; the same on every rank."""
        self._offload.restore("parameters")
        return weights.are_finite(self._model)

    def save(self, directory: Path) -> None:
        """See `PolicyBackend.save`."""
        checkpoint.save(self._state(), directory, step=self._step, world=self.world)

    def load(self, directory: Path, *, weights_only: bool = False) -> None:
        """See `PolicyBackend.load`."""
        self._has_gradient = False
        self._step = checkpoint.load(self._state(), directory)
        if weights_only:
            self._optimizer.reset()
            self._step = 0
        if not self.weights_are_finite():
            raise CheckpointError(f"the weights in {directory} are not finite")

    def _state(self) -> checkpoint.PolicyState:
        """Returns what a checkpoint has of it, on the device."""
        raise NotImplementedError
