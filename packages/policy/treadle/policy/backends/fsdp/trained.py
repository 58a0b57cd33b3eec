"""A model with its gradient and its optimizer: what the FSDP policy and its critic have in common.

Shape suffixes: T loss tokens of a micro-batch, M loss tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.policy.backend import CheckpointError
from treadle.policy.backends.fsdp import checkpoint, weights
from treadle.policy.backends.fsdp.attention import packed
from treadle.policy.backends.fsdp.batches import Batch, MicroBatch
from treadle.policy.backends.fsdp.optimizer import Optimizer, shard
from treadle.policy.backends.loss_batch import to_compute
from treadle.policy.backends.ranks import device
from treadle.policy.client.types import OffloadReport, OptimizerStats
from treadle.policy.rank_time import spent_on

if TYPE_CHECKING:
    from treadle.agent_loop import FloatArray
    from treadle.policy.backends.fsdp.net import Net
    from treadle.policy.client.types import TrainSequence
    from treadle.policy.config.policy import AdamSettings, OptimizerConfig, PolicyConfig


class TrainedNet:
    """See the module. A class that derives from it sets the attributes."""

    _net: Net
    _optimizer: Optimizer
    _config: PolicyConfig
    _settings: OptimizerConfig
    _step = 0
    _has_gradient = False

    @property
    def step(self) -> int:
        """See `PolicyBackend.step`."""
        return self._step

    @torch.no_grad()
    def evaluate(
        self, net: Net, sequences: Sequence[TrainSequence], *settings: float
    ) -> list[FloatArray]:
        """Returns what a model gives first of the loss tokens of a batch, [L] of each sequence."""
        batch = Batch(sequences, [0.0] * len(sequences), at=device(), packs=net.packs)
        values_M = torch.zeros(batch.num_loss_tokens, device=device())
        computed = to_compute(sequences)
        for micro in self.micro_batches(batch, computed):
            with packed(micro.lengths):
                values_T, *_ = net(micro, *settings)
            if not micro.is_blank:
                values_M[micro.slots_T] = values_T
        dist.all_reduce(values_M)
        return batch.unpack(values_M.cpu().numpy())

    def accumulate(
        self, batch: Batch, computed: Sequence[int], loss: Callable[..., Tensor], *settings: float
    ) -> int:
        """Adds the gradient of a loss of what the model gives; returns how many micro-batches."""
        self._has_gradient = True
        count = 0
        for micro in self.micro_batches(batch, computed):
            count += 1
            with packed(micro.lengths):
                outputs = self._net(micro, *settings)
                total = outputs[0].sum() * 0.0 if micro.is_blank else loss(micro, *outputs)
                (total * dist.get_world_size()).backward()  # FSDP takes the mean over ranks
        return count

    def micro_batches(self, batch: Batch, computed: Sequence[int]) -> Iterator[MicroBatch]:
        """Yields this rank's micro-batches, and blank ones to the number of the others'."""
        parts = batch.parts(
            computed,
            max_tokens=self._config.micro_batch_tokens,
            num_shards=dist.get_world_size(),
            shard=dist.get_rank(),
        )
        most = torch.tensor(len(parts), device=device())
        dist.all_reduce(most, dist.ReduceOp.MAX)
        for part in parts:
            yield batch.micro_batch(part)
        for _ in range(int(most) - len(parts)):
            yield batch.blank()

    def optimizer_step(self, settings: AdamSettings | None = None) -> OptimizerStats:
        """See `PolicyBackend.optimizer_step`."""
        if not self._has_gradient:
            raise RuntimeError("there is no gradient: call forward_backward before optimizer_step")
        self._has_gradient = False
        settings = settings or self._settings.at_step(self._step)
        with spent_on("optimizer"):
            norm, skipped = self._optimizer.apply(settings)
        self._step += 1
        return OptimizerStats(
            step=self._step, grad_norm=norm, skipped=skipped, learning_rate=settings.lr
        )

    def weights_are_finite(self) -> bool:
        """See `PolicyBackend.weights_are_finite`."""
        parts = [torch.isfinite(shard(p)).all() for p in self._net.parameters()]
        finite = torch.stack(parts).all().to(torch.int32)
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        return bool(finite)

    def save(self, directory: Path) -> None:
        """See `PolicyBackend.save`."""
        checkpoint.save(self._tensors(), self._identity(), directory, step=self._step)

    def load(self, directory: Path, *, weights_only: bool = False) -> None:
        """See `PolicyBackend.load`."""
        self._optimizer.zero_grad()
        self._has_gradient = False
        with torch.no_grad():
            self._step = checkpoint.load(self._tensors(), self._identity(), directory)
        if weights_only:
            self._optimizer.reset()
            self._step = 0
        if not self.weights_are_finite():
            raise CheckpointError(f"the weights in {directory} are not finite")

    def _tensors(self) -> Mapping[str, Tensor]:
        """Returns what a checkpoint has, where it is: with adapters, only these."""
        kept = {name: tensor.detach() for name, tensor in self._kept().items()}
        return kept | dict(self._optimizer.state())

    def _identity(self) -> dict[str, Any]:
        """Returns what a checkpoint is valid for; collective."""
        return {name: list(tensor.shape) for name, tensor in self._kept().items()}

    def _kept(self) -> Mapping[str, Tensor]:
        tensors = weights.trained_and_kept(self._net)
        if not self._net.lora_scaling:
            return tensors
        return {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}

    def release_memory(self) -> None:
        """See `PolicyBackend.release_memory`; nothing is moved."""

    def take_offload_report(self) -> OffloadReport:
        """See `PolicyBackend.take_offload_report`."""
        return OffloadReport(release_s=0.0, restore_s=0.0, freed_bytes=0, host_bytes=0)
