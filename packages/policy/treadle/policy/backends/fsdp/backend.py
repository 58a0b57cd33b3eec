"""The FSDP policy: one rank's share of a model of transformers, its optimizer, and their steps.

Every method is collective over the policy's ranks (see `policy/backend.py`).

Invariant: the gradient of a step is a plain sum, over micro-batches and ranks, of per-token losses
that were weighted over the whole batch. Number of ranks, micro-batch size and packing order
therefore change results only by rounding. FSDP takes the mean over ranks, so a loss is multiplied
by their number. All ranks run as many micro-batches as the one with the most: each pass gathers the
weights from all of them.

Shape suffixes: T loss tokens of a micro-batch, M loss tokens of the batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from treadle.policy.backend import CheckpointError, LossFn, PolicyBackend, Rendezvous
from treadle.policy.backends.fsdp import checkpoint, weights
from treadle.policy.backends.fsdp.attention import packed
from treadle.policy.backends.fsdp.batches import Batch, MicroBatch
from treadle.policy.backends.fsdp.description import FsdpDescription
from treadle.policy.backends.fsdp.net import Net, load
from treadle.policy.backends.fsdp.optimizer import Optimizer, shard
from treadle.policy.backends.hf_weights import write_folder
from treadle.policy.backends.loss_batch import StatsCollector, to_compute
from treadle.policy.backends.ranks import device, join, together
from treadle.policy.client.batch import token_weights
from treadle.policy.client.types import (
    LossAggregation,
    LossStats,
    NamedTensor,
    OffloadReport,
    OptimizerStats,
    TensorSpec,
)
from treadle.policy.rank_time import spent_on

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from treadle.agent_loop import FloatArray
    from treadle.policy.backend import CriticBackend, Frame
    from treadle.policy.client.types import TrainSequence
    from treadle.policy.config.critic import CriticConfig
    from treadle.policy.config.policy import PolicyConfig


class FsdpPolicy(PolicyBackend):
    """`PolicyBackend` on transformers' modules and torch's FSDP2."""

    def __init__(
        self,
        config: PolicyConfig,
        model_path: Path,
        rendezvous: Rendezvous | None = None,
        *,
        keep_reference: bool = False,
        reference_path: Path | None = None,
    ) -> None:
        """Joins the other ranks and loads the model; see `MegatronPolicy`.

        Raises:
            UnsupportedModelError: The type of the model is not supported.
            ValueError: A weight is not finite, or a setting does not go with the model.
            FileNotFoundError: The folder is not a model folder.
        """
        described = FsdpDescription()
        self._model = described.read_model(model_path)
        if problems := [*described.training_problems(self._model, config)]:
            raise ValueError("\n".join(problems))
        self._config, self._model_path = config, model_path
        self._step = 0
        self._has_gradient = False
        join(config.parallel, rendezvous or Rendezvous())
        try:
            self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
            self._net = self._build(model_path)
            self._optimizer = Optimizer(self._net, config.optimizer)
            self._reference: Net | list[Tensor] | None = None
            if keep_reference and reference_path is None:
                self._reference = [own.clone() for own in self._optimizer.shards.values()]
            elif keep_reference and reference_path is not None:
                described.read_model(reference_path)
                self._reference = self._build(reference_path).requires_grad_(requires_grad=False)
        except BaseException:
            self.close()
            raise

    def _build(self, folder: Path) -> Net:
        """Loads a model, the whole of it on the host, and keeps this rank's share."""
        net = Net(load(folder), chunk=self._config.logits_chunk_tokens)
        if self._config.recompute == "full":
            net.recompute()
        half = self._config.dtype != "float32"
        if self._num_ranks > 1 or half:
            precision = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32
            )
            mesh = init_device_mesh(self.device.type, (self._num_ranks,))
            for layer in net.layers():
                fully_shard(layer, mesh=mesh, mp_policy=precision)
            fully_shard(net, mesh=mesh, mp_policy=precision)
        return net.to(self.device)

    @property
    def step(self) -> int:
        """See `PolicyBackend.step`."""
        return self._step

    @property
    def device(self) -> torch.device:
        """See `PolicyBackend.device`."""
        return device()

    @property
    def leads(self) -> bool:
        """See `PolicyBackend.leads`."""
        return True

    def share(self, frame: Frame | None) -> Frame:
        """See `PolicyBackend.share`."""
        assert frame is not None, "a rank without siblings leads"
        return frame

    def sum_over_shards(self, values_M: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `PolicyBackend.sum_over_shards`."""
        values = torch.from_numpy(values_M).to(self.device, copy=True)
        dist.all_reduce(values)
        found: NDArray[np.float32] = values.cpu().numpy()
        return found

    # --- computing ---------------------------------------------------------------------------

    def logprobs(
        self, sequences: Sequence[TrainSequence], *, temperature: float = 1.0
    ) -> list[FloatArray]:
        """See `PolicyBackend.logprobs`."""
        return self._logprobs(self._net, sequences, temperature)

    @torch.no_grad()
    def _logprobs(
        self, net: Net, sequences: Sequence[TrainSequence], temperature: float
    ) -> list[FloatArray]:
        batch = Batch(sequences, [0.0] * len(sequences), at=self.device, packs=net.packs)
        values_M = torch.zeros(batch.num_loss_tokens, device=self.device)
        computed = [i for i, s in enumerate(sequences) if s.num_loss_tokens]
        for micro in self._micro_batches(batch, computed):
            with packed(micro.lengths):
                logprobs_T, _ = net(micro, temperature)
            if not micro.is_blank:
                values_M[micro.slots_T] = logprobs_T
        dist.all_reduce(values_M)
        return batch.unpack(values_M.cpu().numpy())

    def _micro_batches(self, batch: Batch, computed: Sequence[int]) -> Iterator[MicroBatch]:
        """Yields this rank's micro-batches, and blank ones to the number of the others'."""
        parts = batch.parts(
            computed,
            max_tokens=self._config.micro_batch_tokens,
            num_shards=self._num_ranks,
            shard=self._rank,
        )
        most = torch.tensor(len(parts), device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        for part in parts:
            yield batch.micro_batch(part)
        for _ in range(int(most) - len(parts)):
            yield batch.blank()

    @torch.no_grad()
    def reference_logprobs(
        self, sequences: Sequence[TrainSequence], *, temperature: float = 1.0
    ) -> list[FloatArray]:
        """See `PolicyBackend.reference_logprobs`."""
        if self._reference is None:
            raise RuntimeError("this policy keeps no reference; build it with keep_reference=True")
        if isinstance(self._reference, Net):
            return self._logprobs(self._reference, sequences, temperature)
        shards = list(self._optimizer.shards.values())
        current = [own.clone() for own in shards]
        try:
            torch._foreach_copy_(shards, self._reference)
            return self.logprobs(sequences, temperature=temperature)
        finally:
            torch._foreach_copy_(shards, current)

    def forward_backward(
        self,
        sequences: Sequence[TrainSequence],
        loss: LossFn,
        *,
        aggregation: LossAggregation = "token-mean",
        aggregation_length: int | None = None,
        temperature: float = 1.0,
        keep_tokens: bool = False,
    ) -> LossStats:
        """See `PolicyBackend.forward_backward`."""
        began = time.perf_counter()
        of_tokens = token_weights(sequences, aggregation, aggregation_length)
        batch = Batch(sequences, of_tokens, at=self.device, packs=self._net.packs)
        computed = to_compute(sequences, loss)
        collector = StatsCollector(loss, batch, computed, keep_tokens=keep_tokens)
        self._has_gradient = True
        count = 0
        for micro in self._micro_batches(batch, computed):
            count += 1
            with packed(micro.lengths):
                logprobs_T, entropy_T = self._net(micro, temperature)
                if micro.is_blank:
                    total = logprobs_T.sum() * 0.0
                else:
                    inputs = micro.loss_inputs(logprobs_T, entropy_T)
                    output = loss(inputs)
                    collector.add(micro, micro.num_rows, inputs, output)
                    total = (output.loss_T * micro.weights_T).sum() * self._num_ranks
                total.backward()
        collected = collector.reduce(count)
        return collected.of_step(
            sequences,
            computed,
            num_loss_tokens=batch.num_loss_tokens,
            time_s=time.perf_counter() - began,
        )

    def optimizer_step(self) -> OptimizerStats:
        """See `PolicyBackend.optimizer_step`."""
        if not self._has_gradient:
            raise RuntimeError("there is no gradient: call forward_backward before optimizer_step")
        self._has_gradient = False
        rate = self._config.optimizer.learning_rate(self._step)
        with spent_on("optimizer"):
            norm, skipped = self._optimizer.apply(rate)
        self._step += 1
        return OptimizerStats(step=self._step, grad_norm=norm, skipped=skipped, learning_rate=rate)

    # --- weights and checkpoints ---------------------------------------------------------------

    def weights_are_finite(self) -> bool:
        """See `PolicyBackend.weights_are_finite`."""
        parts = [torch.isfinite(shard(p)).all() for p in self._net.parameters()]
        finite = torch.stack(parts).all().to(torch.int32)
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        return bool(finite)

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """See `PolicyBackend.weight_specs`."""
        return weights.specs(self._net, self._config.dtype)

    def export_weights(self) -> Iterator[NamedTensor]:
        """See `PolicyBackend.export_weights`."""
        return weights.export(self._net, self._config.dtype)

    def save_hf(self, folder: Path) -> None:
        """See `PolicyBackend.save_hf`."""
        exported = self.export_weights()

        def write() -> None:
            write_folder(exported, folder, like=self._model_path)

        def drain() -> None:
            for _ in exported:  # take part to the end, so that no other rank waits for us
                pass

        together(write if self._rank == 0 else None, folder, meanwhile=drain)

    def save_adapter(self, folder: Path) -> None:
        """See `PolicyBackend.save_adapter`."""
        raise RuntimeError("policy.backend=fsdp has no adapter")

    def save(self, directory: Path) -> None:
        """See `PolicyBackend.save`."""
        checkpoint.save(self._tensors(), self._identity(), directory, step=self._step)

    def load(self, directory: Path) -> None:
        """See `PolicyBackend.load`."""
        self._optimizer.zero_grad()
        self._has_gradient = False
        with torch.no_grad():
            self._step = checkpoint.load(self._tensors(), self._identity(), directory)
        if not self.weights_are_finite():
            raise CheckpointError(f"the weights in {directory} are not finite")

    def _tensors(self) -> Mapping[str, Tensor]:
        """Returns what a checkpoint has, where it is."""
        kept = weights.trained_and_kept(self._net)
        named = {f"model.{name}": tensor.detach() for name, tensor in kept.items()}
        return named | dict(self._optimizer.state())

    def _identity(self) -> dict[str, Any]:
        shapes = weights.trained_and_kept(self._net).items()
        return {"model_type": self._model.model_type} | {n: list(t.shape) for n, t in shapes}

    def make_critic(self, config: CriticConfig) -> CriticBackend:
        """See `PolicyBackend.make_critic`."""
        raise RuntimeError("policy.backend=fsdp has no critic")

    def release_memory(self) -> None:
        """See `PolicyBackend.release_memory`; nothing is moved."""

    def take_offload_report(self) -> OffloadReport:
        """See `PolicyBackend.take_offload_report`."""
        return OffloadReport(release_s=0.0, restore_s=0.0, freed_bytes=0, host_bytes=0)

    def close(self) -> None:
        """See `PolicyBackend.close`."""
        dist.destroy_process_group()
