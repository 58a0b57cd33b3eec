"""The Megatron policy: one rank's share of the model, its optimizer, and the steps they take.

Every method is collective over the policy's ranks (see `policy/backend.py`): a rank blocks in
its first collective operation until the others make the same call.

Invariant: the gradient of a step is a plain sum, over micro-batches, data-parallel and context
ranks, of per-token losses that were weighted over the whole batch. Parallel sizes, micro-batch
size and packing order therefore change results only by rounding.

Example, one process::

    policy = MegatronPolicy(PolicyConfig(), Path("model"))
    stats = policy.train_step(sequences, policy_loss(AlgorithmConfig()))

Shape suffixes: P packed rows, H hidden, T loss tokens of a micro-batch, M loss tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from treadle.policy.backend import LossFn, PolicyBackend, Rendezvous
from treadle.policy.backends.hf_weights import WeightsReader, write_together
from treadle.policy.backends.loss_batch import PolicyLoss, to_compute
from treadle.policy.backends.megatron import checkpoint, device, parallel, pipeline, weights
from treadle.policy.backends.megatron.architecture import Architecture
from treadle.policy.backends.megatron.critic.backend import MegatronCritic
from treadle.policy.backends.megatron.experts import load
from treadle.policy.backends.megatron.logprobs import logprobs_and_entropy
from treadle.policy.backends.megatron.lora import adapter
from treadle.policy.backends.megatron.lora.linears import switched_off
from treadle.policy.backends.megatron.model import PolicyModel, build
from treadle.policy.backends.megatron.optimizer import PolicyOptimizer
from treadle.policy.backends.megatron.packing import MicroBatch, MicroBatches
from treadle.policy.backends.megatron.planner import Planner
from treadle.policy.backends.megatron.trained import TrainedModel
from treadle.policy.backends.ranks import sum_over_ranks
from treadle.policy.backends.trained import TrainedPolicy
from treadle.policy.backends.usage import ModelWork, windows_of
from treadle.policy.backends.vision.reader import ImageReader
from treadle.policy.backends.vision.rows import ImagePacker
from treadle.policy.client.batch import token_weights
from treadle.policy.client.types import (
    LossAggregation,
    LossStats,
    NamedTensor,
    TensorSpec,
)
from treadle.policy.config.policy import LoraConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from treadle.agent_loop import FloatArray
    from treadle.policy.backend import Frame
    from treadle.policy.backends.adapter import CollectedAdapter
    from treadle.policy.client.types import TrainSequence
    from treadle.policy.config.critic import CriticConfig
    from treadle.policy.config.policy import PolicyConfig


class MegatronPolicy(TrainedModel, TrainedPolicy, PolicyBackend):
    """`PolicyBackend` on Megatron-core."""

    def __init__(
        self,
        config: PolicyConfig,
        model_path: Path,
        rendezvous: Rendezvous | None = None,
        *,
        keep_reference: bool = False,
        reference_path: Path | None = None,
    ) -> None:
        """Joins the other ranks and loads the model.

        Args:
            rendezvous: This rank's position; None for a policy of one process.
            reference_path: Its Hugging Face folder, another model with the same tokenizer, of any
                size. None: the weights as they are now.

        Raises:
            UnsupportedModelError: The model, or its split into parts, is not supported.
            ValueError: A weight is infinite or NaN.
            FileNotFoundError: The folder is not a model folder.
        """
        self._config, self._settings = config, config.optimizer
        self._model_path = model_path
        self.architecture = Architecture.from_folder(model_path)
        self.architecture.check_sharing(config.share_prefixes)
        self.world = parallel.start(config.parallel, rendezvous or Rendezvous(), seed=config.seed)
        try:
            self.planner = Planner(config, self.world, self.architecture, self._image_packer())
            self._model = build(self.architecture, config, self.world)
            with WeightsReader(model_path) as reader:
                weights.load(self._weights(), reader, self.architecture, self.world)
            if config.lora.rank:
                adapter.start(
                    self._model, config.lora, self.architecture, self.world, seed=config.seed
                )
            if not weights.are_finite(self._model):
                raise ValueError(f"model.path={model_path}: its weights are not finite")
            self._net = pipeline.wrap(self._model, distributed_optimizer=self.world.copies > 1)
            self._optimizer = PolicyOptimizer(self._net, config)
        except BaseException:
            self.world.close()
            raise
        if keep_reference and reference_path is None and not self._begins_bare:
            self._reference = self._copies()
        self._offload = self._offload_of(config.offload, reference=self._other_reference)
        if keep_reference and reference_path is not None:
            self.release_memory()  # the reference may need it
            self._reference = self._load_reference(reference_path)
        self.release_memory()

    def _image_packer(self) -> ImagePacker | None:
        """Returns what finds the images of sequences; None of a model that reads text only."""
        shape = self.architecture.vision
        if shape is None:
            return None
        reader = ImageReader(self._model_path, shape)
        return ImagePacker(reader, shape, has_tower=self.world.is_first_stage)

    def _load_reference(self, path: Path) -> PolicyModel:
        try:
            architecture = Architecture.from_folder(path)
            self.architecture.check_reference(architecture)
            plain = self._config.model_copy(update={"lora": LoraConfig()})
            model = build(architecture, plain, self.world)
            with WeightsReader(path) as reader:
                weights.load(weights.entries(model, architecture), reader, architecture, self.world)
            if not weights.are_finite(model):
                raise ValueError(f"algorithm.reference_path={path}: its weights are not finite")
        except BaseException:
            self.world.close()
            raise
        model.requires_grad_(requires_grad=False)
        return model

    @property
    def device(self) -> torch.device:
        """See `PolicyBackend.device`."""
        return device.device()

    @property
    def leads(self) -> bool:
        """See `PolicyBackend.leads`."""
        return self.world.leads

    def share(self, frame: Frame | None) -> Frame:
        """See `PolicyBackend.share`."""
        return self.world.share(frame)

    def make_critic(self, config: CriticConfig) -> MegatronCritic:
        """See `PolicyBackend.make_critic`."""
        return MegatronCritic(
            config,
            like=self._config,
            model_path=self._model_path,
            world=self.world,
            architecture=self.architecture,
            planner=self.planner,
        )

    def close(self) -> None:
        """See `PolicyBackend.close`; frees the model, which holds the groups and their threads."""
        self.world.close()
        # A dispatcher of tokens keeps the graph of its last ones, and that the hooks of parameters:
        # a cycle through C++, which Python does not collect.
        for module in self._model.modules():
            if hasattr(module, "token_dispatcher"):
                module.token_dispatcher = None
        del self._model, self._net, self._optimizer, self._offload
        self._reference = None

    def _trained(self) -> Iterator[torch.nn.Parameter]:
        return (p for p in self._model.parameters() if p.requires_grad)

    def _other_reference(self) -> Iterator[Tensor]:
        if isinstance(self._reference, PolicyModel):
            yield from self._reference.parameters()

    # --- computing ---------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(
        self, sequences: Sequence[TrainSequence], *, temperature: float = 1.0
    ) -> list[FloatArray]:
        """See `PolicyBackend.logprobs`."""
        self._offload.restore("parameters")
        return self._logprobs(self._model, sequences, temperature)

    def _logprobs(
        self, model: PolicyModel, sequences: Sequence[TrainSequence], temperature: float
    ) -> list[FloatArray]:
        computed = to_compute(sequences)
        micro_batches = self._plan(sequences, [0.0] * len(sequences), computed, model)
        return self.evaluate(
            self._net if model is self._model else model,
            micro_batches,
            lambda micro, hidden: self._head(model, micro, hidden, temperature)[0],
        )

    def _plan(
        self,
        sequences: Sequence[TrainSequence],
        of_tokens: Sequence[float],
        computed: Sequence[int],
        model: PolicyModel,
    ) -> MicroBatches:
        return self.planner.plan(
            sequences,
            of_tokens,
            computed,
            plain_attention=model.attention_is_plain,
            replays_experts=self._config.moe.routing_replay,
        )

    def reference_logprobs(
        self, sequences: Sequence[TrainSequence], *, temperature: float = 1.0
    ) -> list[FloatArray]:
        """See `PolicyBackend.reference_logprobs`; the reference chooses its own experts."""
        own = [replace(s, routed_experts=None) for s in sequences]
        return super().reference_logprobs(own, temperature=temperature)

    def _without_adapters(self) -> AbstractContextManager[None]:
        return switched_off(self._model)

    def add_gradient(
        self,
        sequences: Sequence[TrainSequence],
        loss: LossFn,
        *,
        aggregation: LossAggregation = "token-mean",
        aggregation_length: int | None = None,
        temperature: float = 1.0,
        keep_tokens: bool = False,
    ) -> Callable[[], LossStats]:
        """See `PolicyBackend.add_gradient`."""
        of_tokens = token_weights(sequences, aggregation, aggregation_length)
        computed = to_compute(sequences, loss)
        micro_batches = self._plan(sequences, of_tokens, computed, self._model)
        packer, speaks = micro_batches.packer, self.world.speaks
        of_batch = PolicyLoss(loss, packer, computed, keep_tokens=keep_tokens, speaks=speaks)

        def weighted(micro: MicroBatch, hidden: Tensor) -> Tensor:
            return of_batch(micro, *self._head(self._model, micro, hidden, temperature))

        load.reset(self._model)
        self.accumulate(micro_batches, weighted)

        def statistics() -> LossStats:
            stats = of_batch.reduce(len(micro_batches))
            of_experts = load.metrics(
                self._model, self.architecture, replaying=self._config.moe.routing_replay
            )
            return replace(stats, metrics={**stats.metrics, **of_experts})

        return statistics

    def work(self) -> ModelWork:
        """See `PolicyBackend.work`."""
        shape, experts = self.architecture, self.architecture.experts
        dense = sum(rows * columns for columns, rows in shape.matrices.values())
        weights = float(shape.num_layers * dense)
        if experts is not None:
            own, theirs = experts.per_token * experts.ffn_size, shape.ffn_size
            of_layer = 3 * (own - theirs) + experts.number  # which the router has
            weights += len(experts.layers) * shape.hidden_size * of_layer
        return ModelWork(
            weights=weights,
            head=shape.vocab_size * shape.hidden_size,
            heads=shape.num_heads * shape.head_dim,
            windows=windows_of([shape.window(layer) for layer in range(shape.num_layers)]),
            passes=2 if self._config.lora.rank else 3,
        )

    def sum_over_shards(self, values_M: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `PolicyBackend.sum_over_shards`."""
        return sum_over_ranks(values_M, speaks=self.world.speaks)

    def _head(
        self, model: PolicyModel, micro: MicroBatch, hidden_P1H: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Returns the [T] log-probabilities and entropies of the loss tokens."""
        logprobs_K, entropy_K = logprobs_and_entropy(
            micro.at_predictors(hidden_P1H.squeeze(1)),
            model.head_weight,
            micro.targets_K,
            micro.sampling_masks,
            vocab_size=model.num_ids,
            group=self.world.tensor_group,
            chunk=self._config.logits_chunk_tokens,
            temperature=temperature,
            softcap=model.logit_softcap,
        )
        logprobs_T, entropy_T = micro.of_all_tokens(logprobs_K, entropy_K)
        return logprobs_T, entropy_T

    # --- weights and checkpoints ---------------------------------------------------------------

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """See `PolicyBackend.weight_specs`."""
        return weights.specs(
            self._weights(), self.architecture, self.world, dtype=self._config.dtype
        )

    def export_weights(self) -> Iterator[NamedTensor]:
        """See `PolicyBackend.export_weights`."""
        self._offload.restore("parameters")
        dtype: torch.dtype = getattr(torch, self._config.dtype)
        return weights.export(self._weights(), self.architecture, self.world, dtype=dtype)

    def _weights(self) -> Iterator[weights.WeightEntry]:
        return weights.entries(self._model, self.architecture)

    def save_hf(self, folder: Path) -> None:
        """See `PolicyBackend.save_hf`."""
        everything = checkpoint.collect(self.export_weights(), self.weight_specs(), self.world)
        write_together(everything, folder, like=self._model_path, adapter=self._adapter())

    def _adapter(self) -> CollectedAdapter | None:
        if not self._config.lora.rank:
            return None
        self._offload.restore("parameters")
        return adapter.collect(
            self._model, self._config, self.architecture, self.world, base=self._model_path
        )

    def _state(self) -> checkpoint.PolicyState:
        self._offload.restore("parameters", "optimizer")
        lora = self._config.lora
        return checkpoint.PolicyState(
            self._model,
            self._optimizer,
            self.architecture,
            adapter.identity(self._model, lora, self.architecture, self.world)
            if lora.rank
            else None,
        )
