"""The Megatron policy: one rank's share of the model, its optimizer, and the steps they take.

Every method is collective over the policy's ranks (see `policy/backend.py`): a rank blocks in
its first collective operation until the others make the same call. Between calls a rank holds
parameters and optimizer state, nothing else.

Invariant: the gradient of a step is a plain sum, over micro-batches and data-parallel ranks, of
per-token losses that were weighted over the whole batch. Parallel sizes, micro-batch size and
packing order therefore change results only by rounding.

Example, one process::

    policy = MegatronPolicy(PolicyConfig(), Path("model"))
    stats = policy.train_step(sequences, policy_loss(AlgorithmConfig()))

Shape suffixes: P packed rows, H hidden, T loss tokens of a micro-batch, M loss tokens of the batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.trainer.algorithms.mismatch import mismatch_metrics
from treadle.trainer.policy.backend import CheckpointError, LossFn, LossInputs
from treadle.trainer.policy.batch import balance, has_gradient, input_length, pack, token_weights
from treadle.trainer.policy.hf_weights import WeightsReader
from treadle.trainer.policy.megatron import checkpoint, device, parallel, weights
from treadle.trainer.policy.megatron.architecture import Architecture
from treadle.trainer.policy.megatron.attention import take_rows
from treadle.trainer.policy.megatron.logprobs import logprobs_and_entropy
from treadle.trainer.policy.megatron.model import PolicyModel, build
from treadle.trainer.policy.megatron.optimizer import PolicyOptimizer, learning_rate
from treadle.trainer.policy.megatron.packing import MicroBatch, Packer
from treadle.trainer.policy.types import (
    LossAggregation,
    NamedTensor,
    StepStats,
    TensorSpec,
)

device.install()

from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

if TYPE_CHECKING:
    from treadle.trainer.config.policy import PolicyConfig
    from treadle.trainer.policy.backend import LossOutput
    from treadle.trainer.policy.types import TrainSequence


class MegatronPolicy:
    """`PolicyBackend` on Megatron-core."""

    def __init__(
        self,
        config: PolicyConfig,
        model_path: Path,
        rendezvous: parallel.Rendezvous | None = None,
        *,
        keep_reference: bool = False,
    ) -> None:
        """Joins the other ranks and loads the model.

        Args:
            config: Parallel sizes, optimizer, memory.
            model_path: Hugging Face folder: config.json and safetensors.
            rendezvous: This rank's position; None for a policy of one process.
            keep_reference: Keep a copy of the weights as they are now, for
                `reference_logprobs`.

        Raises:
            UnsupportedModelError: The model, or its split into parts, is not supported.
            ValueError: A weight is infinite or NaN.
            FileNotFoundError: The folder is not a model folder.
        """
        self._config = config
        self._model_path = model_path
        self.architecture = Architecture.from_folder(model_path)
        self.world = parallel.start(
            config.parallel, rendezvous or parallel.Rendezvous(), seed=config.seed
        )
        try:
            self._model = build(self.architecture, config, self.world)
            with WeightsReader(model_path) as reader:
                weights.load(self._model, reader, self.architecture, self.world)
            if not self.weights_are_finite():
                raise ValueError(f"model.path={model_path}: its weights are not finite")
            self._net = _wrap(self._model, distributed_optimizer=self.world.data > 1)
            self._optimizer = PolicyOptimizer(self._net, config)
        except BaseException:
            self.world.close()
            raise
        self._reference = (
            [p.detach().clone() for p in self._model.parameters()] if keep_reference else None
        )
        self._step = 0

    @property
    def step(self) -> int:
        """Optimizer steps taken, skipped ones included."""
        return self._step

    def close(self) -> None:
        """Leaves the policy's ranks; the object cannot be used afterwards."""
        self.world.close()

    # --- computing ---------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(
        self, sequences: Sequence[TrainSequence], *, temperature: float = 1.0
    ) -> list[tuple[float, ...]]:
        """See `PolicyBackend.logprobs`."""
        packer = Packer(
            sequences,
            [0.0] * len(sequences),
            at=device.device(),
            row_multiple=self._row_multiple,
        )
        values_M = torch.zeros(packer.num_loss_tokens, device=device.device())

        def collect(micro: MicroBatch, hidden: Tensor) -> Tensor:
            logprobs_T, _ = self._head(micro, hidden, temperature)
            if self.world.speaks:
                values_M[micro.slots_T] = logprobs_T
            return logprobs_T.sum()

        computed = [i for i, s in enumerate(sequences) if s.num_loss_tokens]
        micro_batches = self._micro_batches(packer, sequences, computed)
        self._run(micro_batches, collect, forward_only=True)
        dist.all_reduce(values_M)
        return packer.unpack(values_M.tolist())

    @torch.no_grad()
    def reference_logprobs(
        self, sequences: Sequence[TrainSequence], *, temperature: float = 1.0
    ) -> list[tuple[float, ...]]:
        """See `PolicyBackend.reference_logprobs`."""
        if self._reference is None:
            raise RuntimeError("this policy keeps no reference; build it with keep_reference=True")
        parameters = list(self._model.parameters())
        current = [p.detach().clone() for p in parameters]
        try:
            for parameter, reference in zip(parameters, self._reference, strict=True):
                parameter.copy_(reference)
            return self.logprobs(sequences, temperature=temperature)
        finally:
            for parameter, value in zip(parameters, current, strict=True):
                parameter.copy_(value)

    def train_step(
        self,
        sequences: Sequence[TrainSequence],
        loss: LossFn,
        *,
        aggregation: LossAggregation = "token-mean",
        aggregation_length: int | None = None,
        temperature: float = 1.0,
    ) -> StepStats:
        """See `PolicyBackend.train_step`.

        Raises:
            ValueError: No sequence has a loss token.
        """
        began = time.perf_counter()
        packer = Packer(
            sequences,
            token_weights(sequences, aggregation, aggregation_length),
            at=device.device(),
            row_multiple=self._row_multiple,
        )
        computed = [
            i
            for i, s in enumerate(sequences)
            if s.num_loss_tokens and (has_gradient(s) or not loss.zero_without_advantage)
        ]
        micro_batches = self._micro_batches(packer, sequences, computed)
        collector = _StatsCollector(loss, packer, computed, self.world)

        def weighted(micro: MicroBatch, hidden: Tensor) -> Tensor:
            logprobs_T, entropy_T = self._head(micro, hidden, temperature)
            inputs = micro.loss_inputs(logprobs_T, entropy_T)
            output = loss(inputs)
            collector.add(micro, inputs, output)
            return (output.loss_T * micro.weights_T).sum()

        self._net.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._run(micro_batches, weighted, forward_only=False)
        lr = learning_rate(self._config.optimizer, self._step)
        applied = self._optimizer.apply(lr)
        self._step += 1
        collected = collector.reduce(micro_batches)
        return StepStats(
            step=self._step,
            loss=collected.loss,
            grad_norm=applied.grad_norm,
            skipped=applied.skipped,
            learning_rate=lr,
            num_sequences=len(sequences),
            num_computed=len(computed),
            num_tokens=sum(input_length(sequences[i]) for i in computed),
            num_loss_tokens=packer.num_loss_tokens,
            num_micro_batches=collected.num_micro_batches,
            time_s=time.perf_counter() - began,
            metrics=collected.metrics,
        )

    @property
    def _row_multiple(self) -> int:
        return self.world.tensor if self.world.sequence_parallel else 1

    def _micro_batches(
        self, packer: Packer, sequences: Sequence[TrainSequence], computed: Sequence[int]
    ) -> list[MicroBatch]:
        """Returns this data-parallel rank's share; may be empty."""
        lengths = [input_length(sequences[i]) for i in computed]
        share = balance(lengths, self.world.data)[self.world.data_rank]
        packs = pack(
            [lengths[i] for i in share],
            max_tokens=self._config.micro_batch_tokens,
            at_least=self.world.pipeline,
        )
        return [packer.micro_batch([computed[share[i]] for i in members]) for members in packs]

    def _run(self, micro_batches: Sequence[MicroBatch], loss: Any, *, forward_only: bool) -> None:
        """Takes the micro-batches through the pipeline; gradients are left summed over ranks."""
        if not micro_batches:  # the schedules need one; the other ranks still wait for our sum
            if not forward_only:
                finalize_model_grads([self._net], None)
            return

        def forward(batches: Iterator[MicroBatch], net: DistributedDataParallel) -> Any:
            micro = next(batches)
            hidden = net(micro.ids_1P, micro.positions_P, micro.segments)
            nothing = torch.zeros((), dtype=torch.int)  # Megatron is not to normalise again
            return hidden, lambda hidden: (loss(micro, hidden), nothing, None)

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(micro_batches),
            model=[self._net],
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0].num_rows,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _head(
        self, micro: MicroBatch, hidden_P1H: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Returns the [T] log-probabilities and entropies of the loss tokens."""
        return logprobs_and_entropy(
            take_rows(hidden_P1H.squeeze(1), micro.rows_T),
            self._model.head_weight,
            micro.targets_T,
            vocab_size=self.architecture.vocab_size,
            group=self.world.tensor_group,
            chunk=self._config.logits_chunk_tokens,
            temperature=temperature,
        )

    # --- weights and checkpoints ---------------------------------------------------------------

    @torch.no_grad()
    def weights_are_finite(self) -> bool:
        """See `PolicyBackend.weights_are_finite`."""
        finite = torch.stack([torch.isfinite(p).all() for p in self._model.parameters()]).all()
        everywhere = finite.to(torch.int32)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
        return bool(everywhere)

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """See `PolicyBackend.weight_specs`."""
        return weights.specs(self._model, self.architecture, self.world, dtype=self._config.dtype)

    def export_weights(self) -> Iterator[NamedTensor]:
        """See `PolicyBackend.export_weights`."""
        dtype: torch.dtype = getattr(torch, self._config.dtype)
        return weights.export(self._model, self.architecture, self.world, dtype=dtype)

    def save_hf(self, folder: Path) -> None:
        """See `PolicyBackend.save_hf`."""
        checkpoint.save_hf(
            self.export_weights(), self.weight_specs(), folder, like=self._model_path, w=self.world
        )

    def save(self, directory: Path) -> None:
        """See `PolicyBackend.save`."""
        state = checkpoint.PolicyState(self._model, self._optimizer, self.architecture)
        checkpoint.save(state, directory, step=self._step, world=self.world)

    def load(self, directory: Path) -> None:
        """See `PolicyBackend.load`."""
        state = checkpoint.PolicyState(self._model, self._optimizer, self.architecture)
        self._step = checkpoint.load(state, directory)
        if not self.weights_are_finite():
            raise CheckpointError(f"the weights in {directory} are not finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Collected:
    """A step's statistics, the same on every rank."""

    loss: float
    num_micro_batches: int
    metrics: Mapping[str, float]


class _StatsCollector:
    """Sums each micro-batch's statistics over loss tokens; ranks are reduced once, at the end.

    Invariant: a metric is a mean over the loss tokens that went through the model, exact for any
    cut of the batch; if none did, there are no metrics. The difference to the rollout engine is
    kept per token, since a percentile cannot be reduced from parts.
    """

    def __init__(
        self, loss: LossFn, packer: Packer, computed: Sequence[int], world: parallel.World
    ) -> None:
        """Args are those of the step; `computed` are the sequences that go through the model."""
        self._world = world
        self._names = ["actor/entropy", *_metric_names(loss)]
        self._slots_M = packer.slots(computed)
        self._stale_M = packer.stale(computed)
        at = self._slots_M.device
        self._sums = torch.zeros(1 + len(self._names), dtype=torch.float64, device=at)
        self._gaps_M = torch.zeros(packer.num_loss_tokens, device=at)
        self._has_rollout = packer.has("rollout_logprobs")

    @torch.no_grad()
    def add(self, micro: MicroBatch, inputs: LossInputs, output: LossOutput) -> None:
        """Counts one micro-batch."""
        if not self._world.speaks:
            return
        weighted_T = output.loss_T.detach() * micro.weights_T
        values = [weighted_T, inputs.entropy_T.detach(), *output.metrics_T.values()]
        self._sums += torch.stack([v.sum(dtype=torch.float64) for v in values])
        if inputs.rollout_logprobs_T is not None:
            gaps_T = inputs.logprobs_T.detach() - inputs.rollout_logprobs_T
            self._gaps_M[micro.slots_T] = gaps_T

    @torch.no_grad()
    def reduce(self, micro_batches: Sequence[object]) -> _Collected:
        """Collective: the sums over all ranks."""
        count = torch.tensor(len(micro_batches), device=self._sums.device)
        dist.all_reduce(count, dist.ReduceOp.MAX)
        dist.all_reduce(self._sums)
        loss, *sums = self._sums.tolist()
        tokens = len(self._slots_M)
        if not tokens:
            return _Collected(loss=loss, num_micro_batches=0, metrics={})
        metrics = {name: total / tokens for name, total in zip(self._names, sums, strict=True)}
        if self._has_rollout:
            dist.all_reduce(self._gaps_M)
            metrics |= mismatch_metrics(self._gaps_M[self._slots_M], self._stale_M)
        return _Collected(loss=loss, num_micro_batches=int(count), metrics=metrics)


def _metric_names(loss: LossFn) -> list[str]:
    """Asked of the loss itself, as a rank may have no micro-batch to see them in."""
    empty = torch.zeros(0)
    nothing = LossInputs(
        logprobs_T=empty,
        entropy_T=empty,
        advantages_T=empty,
        old_logprobs_T=empty,
        rollout_logprobs_T=empty,
        ref_logprobs_T=empty,
    )
    return list(loss(nothing).metrics_T)


def _wrap(model: PolicyModel, *, distributed_optimizer: bool) -> DistributedDataParallel:
    """Megatron's gradient buffers; they sum in float32 and are reduced once per step."""
    net = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=distributed_optimizer,
        ),
        model,
    )

    def finalize(nets: list[Any], _: object, **kwargs: Any) -> None:
        finalize_model_grads(nets, None, **kwargs)  # None: do not divide by a token count

    model.config.finalize_model_grads_func = finalize
    return net
