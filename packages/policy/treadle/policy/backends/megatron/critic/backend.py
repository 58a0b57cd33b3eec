"""The Megatron critic: values of sampled sequences, and the steps that teach them.

It lives on the policy's ranks, in the policy's process groups, with the same layout, micro-batches
and precision; model and optimizer are its own. Every method is collective (see
`policy/backend.py`), and the same invariant holds: a step's gradient is a plain sum of per-token
losses that were weighted over the whole batch.

Shape suffixes: P packed rows, H hidden, T loss tokens of a micro-batch, M loss tokens of the batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treadle.policy.backend import CriticBackend, step_stats
from treadle.policy.backends.hf_weights import WeightsReader
from treadle.policy.backends.loss_batch import ValueLoss, to_compute
from treadle.policy.backends.megatron import checkpoint, pipeline, weights
from treadle.policy.backends.megatron.critic.model import CriticModel
from treadle.policy.backends.megatron.model import build
from treadle.policy.backends.megatron.optimizer import PolicyOptimizer
from treadle.policy.backends.megatron.trained import TrainedModel
from treadle.policy.client.batch import token_weights
from treadle.policy.client.types import LossAggregation, StepStats
from treadle.policy.config.policy import LoraConfig

if TYPE_CHECKING:
    from treadle.agent_loop import FloatArray
    from treadle.policy.backends.megatron.architecture import Architecture
    from treadle.policy.backends.megatron.packing import MicroBatch, MicroBatches
    from treadle.policy.backends.megatron.parallel import World
    from treadle.policy.backends.megatron.planner import Planner
    from treadle.policy.client.types import TrainSequence
    from treadle.policy.config.critic import CriticConfig
    from treadle.policy.config.policy import PolicyConfig


class MegatronCritic(TrainedModel, CriticBackend):
    """The critic on one rank, beside the policy."""

    def __init__(
        self,
        config: CriticConfig,
        *,
        like: PolicyConfig,
        model_path: Path,
        world: World,
        architecture: Architecture,
        planner: Planner,
    ) -> None:
        """Loads the decoder's weights; the value head begins at 0.

        Args:
            like: The policy's settings, of which it takes layout, precision and memory.
            architecture: The policy's, and its decoder's.
            planner: Plans the policy's micro-batches, too.

        Raises:
            FileNotFoundError: The folder is not a model folder.
        """
        self._planner, self._config, self._settings = planner, config, config.optimizer
        self.world = world
        # All of its weights are trained, also where the policy trains adapters.
        settings = like.model_copy(update={"optimizer": config.optimizer, "lora": LoraConfig()})
        # The value head takes the place of the output layer, whether or not that was tied.
        architecture = replace(architecture, tied=False)
        self._architecture = architecture
        model = build(architecture, settings, world, CriticModel)
        assert isinstance(model, CriticModel)
        with WeightsReader(model_path) as reader:
            weights.load(weights.entries(model, architecture), reader, architecture, world)
        model.add_head()
        self._model = model
        self._net = pipeline.wrap(model, distributed_optimizer=world.copies > 1)
        self._optimizer = PolicyOptimizer(self._net, settings)
        self._offload = self._offload_of(like.offload)
        self.release_memory()

    @torch.no_grad()
    def values(self, sequences: Sequence[TrainSequence]) -> list[FloatArray]:
        """See `CriticBackend.values`."""
        self._offload.restore("parameters")
        computed = to_compute(sequences)
        micro_batches = self._plan(sequences, [0.0] * len(sequences), computed)
        return self.evaluate(self._net, micro_batches, self._values)

    def train_step(
        self,
        sequences: Sequence[TrainSequence],
        *,
        aggregation: LossAggregation = "token-mean",
        aggregation_length: int | None = None,
    ) -> StepStats:
        """See `CriticBackend.train_step`."""
        began = time.perf_counter()
        of_tokens = token_weights(sequences, aggregation, aggregation_length)
        computed = to_compute(sequences)
        micro_batches = self._plan(sequences, of_tokens, computed)
        packer, speaks = micro_batches.packer, self.world.speaks
        loss = ValueLoss(packer, computed, clip=self._config.clip_value, speaks=speaks)
        self.accumulate(
            micro_batches, lambda micro, hidden: loss(micro, self._values(micro, hidden))
        )
        applied = self.optimizer_step()
        stats = loss.reduce(len(micro_batches))
        return step_stats(stats, applied, time_s=time.perf_counter() - began)

    def _plan(
        self,
        sequences: Sequence[TrainSequence],
        of_tokens: Sequence[float],
        computed: Sequence[int],
    ) -> MicroBatches:
        return self._planner.plan(
            sequences, of_tokens, computed, plain_attention=self._model.attention_is_plain
        )

    def _values(self, micro: MicroBatch, hidden_P1H: Tensor) -> Tensor:
        values_K = self._model.values(micro.at_predictors(hidden_P1H.squeeze(1)))
        (values_T,) = micro.of_all_tokens(values_K)
        return values_T

    def _state(self) -> checkpoint.PolicyState:
        self._offload.restore("parameters", "optimizer")
        return checkpoint.PolicyState(self._model, self._optimizer, self._architecture)
