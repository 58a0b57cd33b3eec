"""A model with its gradient and its optimizer: what the FSDP policy and its critic have in common.

Shape suffixes: T loss tokens of a micro-batch, M loss tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from treadle.policy.backends.fsdp import checkpoint, weights
from treadle.policy.backends.fsdp.attention import packed
from treadle.policy.backends.fsdp.batches import Batch, MicroBatch
from treadle.policy.backends.fsdp.optimizer import Optimizer, shard
from treadle.policy.backends.loss_batch import to_compute
from treadle.policy.backends.offload import Offload, offload_of
from treadle.policy.backends.ranks import device
from treadle.policy.backends.trained import Trained

if TYPE_CHECKING:
    from treadle.agent_loop import FloatArray
    from treadle.policy.backends.fsdp.context import Context
    from treadle.policy.backends.fsdp.net import Net
    from treadle.policy.backends.vision.rows import ImagePacker
    from treadle.policy.client.types import TrainSequence
    from treadle.policy.config.policy import OffloadConfig, PolicyConfig


class TrainedNet(Trained):
    """See the module. A class that derives from it sets the attributes."""

    _net: Net
    _optimizer: Optimizer
    _config: PolicyConfig
    _images: ImagePacker | None = None
    _context: Context

    def _offload_of(
        self, config: OffloadConfig, *, reference: Callable[[], Iterable[Tensor]] = tuple
    ) -> Offload:
        parameters = [shard(p) for p in self._net.parameters()]
        return offload_of(
            config,
            parameters=lambda: parameters,
            gradients=lambda: (shard(p.grad) for p in self._net.parameters() if p.grad is not None),
            state=self._optimizer.tensors,
            reference=reference,
        )

    def _batch(
        self, net: Net, sequences: Sequence[TrainSequence], weights: Sequence[float]
    ) -> Batch:
        return Batch(
            sequences,
            weights,
            at=device(),
            packs=net.packs,
            multiple=self._context.size,
            images=self._images,
        )

    @torch.no_grad()
    def evaluate(
        self, net: Net, sequences: Sequence[TrainSequence], *settings: float
    ) -> list[FloatArray]:
        """Returns what a model gives first of the loss tokens of a batch, [L] of each sequence."""
        batch = self._batch(net, sequences, [0.0] * len(sequences))
        values_M = torch.zeros(batch.num_loss_tokens, device=device())
        computed = to_compute(sequences)
        for micro in self.micro_batches(batch, computed):
            with packed(micro.lengths, self._context):
                values_T, *_ = net(micro, *settings)
            if self._context.leads and not micro.is_blank:
                values_M[micro.slots_T] = values_T
        if isinstance(net, FSDPModule):
            net.reshard()  # else its outer part stays whole, and a change of it is not seen
        dist.all_reduce(values_M)
        return batch.unpack(values_M.cpu().numpy())

    def accumulate(
        self, batch: Batch, computed: Sequence[int], loss: Callable[..., Tensor], *settings: float
    ) -> int:
        """Adds the gradient of a loss of what the model gives; returns how many micro-batches."""
        self._offload.restore("parameters", "gradients")
        self._has_gradient = True
        count = 0
        for micro in self.micro_batches(batch, computed):
            count += 1
            with packed(micro.lengths, self._context):
                outputs = self._net(micro, *settings)
                total = outputs[0].sum() * 0.0 if micro.is_blank else loss(micro, *outputs)
                # FSDP takes the mean over ranks, of which those with parts of matrices are one.
                (total * (dist.get_world_size() // self._config.parallel.tensor)).backward()
        return count

    def micro_batches(self, batch: Batch, computed: Sequence[int]) -> Iterator[MicroBatch]:
        """Yields this rank's micro-batches, and blank ones to the number of the others'."""
        parts = batch.parts(
            computed,
            max_tokens=self._config.micro_batch_tokens * self._context.size,
            num_shards=self._context.shards,
            shard=self._context.shard,
        )
        most = len(parts)
        if dist.get_world_size() > 1:  # before there is work that a wait for the device would end
            of_ranks = torch.tensor(most, device=device())
            dist.all_reduce(of_ranks, dist.ReduceOp.MAX)
            most = int(of_ranks)
        for number, part in enumerate(parts):
            batch.prefetch([index for later in parts[number + 1 : number + 2] for index in later])
            yield batch.micro_batch(part)
        for _ in range(most - len(parts)):
            yield batch.blank()

    def weights_are_finite(self) -> bool:
        """See `PolicyBackend.weights_are_finite`."""
        self._offload.restore("parameters")
        parts = [torch.isfinite(shard(p)).all() for p in self._net.parameters()]
        finite = torch.stack(parts).all().to(torch.int32)
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        return bool(finite)

    def save(self, directory: Path) -> None:
        """See `PolicyBackend.save`."""
        checkpoint.save(self._tensors(), self._identity(), directory, step=self._step)

    def _read(self, directory: Path) -> int:
        self._optimizer.zero_grad()
        with torch.no_grad():
            return checkpoint.load(self._tensors(), self._identity(), directory)

    def _tensors(self) -> Mapping[str, Tensor]:
        """Returns what a checkpoint has, where it is: with adapters, only these."""
        self._offload.restore("parameters", "optimizer")
        kept = {name: tensor.detach() for name, tensor in self._kept().items()}
        return kept | dict(self._optimizer.state())

    def _identity(self) -> dict[str, Any]:
        """Returns what a checkpoint is valid for; collective."""
        name = self._settings.name
        settings = {"policy.optimizer.name": None if name == "adamw" else name}
        return settings | {name: list(tensor.shape) for name, tensor in self._kept().items()}

    def _kept(self) -> Mapping[str, Tensor]:
        tensors = weights.trained_and_kept(self._net)
        if not self._net.lora_scaling:
            return tensors
        return {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
