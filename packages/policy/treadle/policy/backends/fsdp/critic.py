"""The FSDP critic: values of sampled sequences, and the steps that teach them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.policy.backend import CriticBackend, step_stats
from treadle.policy.backends.fsdp.net import ValueNet, load
from treadle.policy.backends.fsdp.optimizer import Optimizer
from treadle.policy.backends.fsdp.sharding import spread
from treadle.policy.backends.fsdp.trained import TrainedNet
from treadle.policy.backends.loss_batch import ValueLoss, to_compute
from treadle.policy.client.batch import token_weights

if TYPE_CHECKING:
    from treadle.agent_loop import FloatArray
    from treadle.policy.backends.fsdp.context import Context
    from treadle.policy.backends.vision.rows import ImagePacker
    from treadle.policy.client.types import LossAggregation, StepStats, TrainSequence
    from treadle.policy.config.critic import CriticConfig
    from treadle.policy.config.policy import PolicyConfig


class FsdpCritic(TrainedNet, CriticBackend):
    """The critic on one rank, beside the policy."""

    def __init__(
        self,
        config: CriticConfig,
        like: PolicyConfig,
        model_path: Path,
        images: ImagePacker | None,
        context: Context,
    ) -> None:
        """Loads the decoder's weights, all of which are trained; the value head begins at 0.

        Args:
            like: The policy's settings, of which it takes precision and memory.
            images: Finds the images of a model that sees.
            context: Place of this rank, as the policy has it.

        Raises:
            UnsupportedModelError: The model gives no hidden states.
        """
        self._images, self._context = images, context
        self._clip, self._config, self._settings = config.clip_value, like, config.optimizer
        net = ValueNet(load(model_path), chunk=like.logits_chunk_tokens, context=context)
        net.freeze_tower(frozen=like.freeze_vision_tower)
        self._net = spread(net, like)
        self._optimizer = Optimizer(self._net, config.optimizer)
        self._offload = self._offload_of(like.offload)
        self.release_memory()

    def values(self, sequences: Sequence[TrainSequence]) -> list[FloatArray]:
        """See `CriticBackend.values`."""
        self._offload.restore("parameters")
        return self.evaluate(self._net, sequences)

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
        batch = self._batch(self._net, sequences, of_tokens)
        computed = to_compute(sequences)
        loss = ValueLoss(batch, computed, clip=self._clip, speaks=self._context.leads)
        count = self.accumulate(batch, computed, loss)
        applied = self.optimizer_step()
        return step_stats(loss.reduce(count), applied, time_s=time.perf_counter() - began)
