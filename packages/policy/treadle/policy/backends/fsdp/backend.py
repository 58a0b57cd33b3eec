"""The FSDP policy: one rank's share of a model of transformers, its optimizer, and their steps.

Every method is collective over the policy's ranks (see `policy/backend.py`).

Invariant: the gradient of a step is a plain sum, over micro-batches and ranks, of per-token losses
that were weighted over the whole batch. Number of ranks, micro-batch size and packing order
therefore change results only by rounding. All ranks run as many micro-batches as the one with the
most: each pass gathers the weights from all of them.

Shape suffix: M loss tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.policy.backend import LossFn, PolicyBackend, Rendezvous
from treadle.policy.backends import adapter
from treadle.policy.backends.description import UnsupportedModelError
from treadle.policy.backends.fsdp import lora, weights
from treadle.policy.backends.fsdp.context import Context
from treadle.policy.backends.fsdp.description import FsdpDescription
from treadle.policy.backends.fsdp.net import Net, load
from treadle.policy.backends.fsdp.optimizer import Optimizer, shard
from treadle.policy.backends.fsdp.sharding import spread
from treadle.policy.backends.fsdp.trained import TrainedNet
from treadle.policy.backends.hf_weights import write_together
from treadle.policy.backends.loss_batch import PolicyLoss, to_compute
from treadle.policy.backends.ranks import device, join, share, sum_over_ranks
from treadle.policy.backends.trained import TrainedPolicy
from treadle.policy.backends.usage import ModelWork
from treadle.policy.backends.vision.rows import ImagePacker
from treadle.policy.client.batch import token_weights
from treadle.policy.client.types import (
    LossAggregation,
    LossStats,
    NamedTensor,
    TensorSpec,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from treadle.agent_loop import FloatArray
    from treadle.policy.backend import CriticBackend, Frame
    from treadle.policy.client.types import TrainSequence
    from treadle.policy.config.critic import CriticConfig
    from treadle.policy.config.policy import PolicyConfig


class FsdpPolicy(TrainedNet, TrainedPolicy, PolicyBackend):
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
        self._config, self._settings, self._model_path = config, config.optimizer, model_path
        rendezvous = rendezvous or Rendezvous()
        join(config.parallel, rendezvous)
        self._context = context = Context.joined(config.parallel, rendezvous)
        try:
            if self._model.vision is not None:
                # Here, because it takes a second, which ranks of text models need not spend.
                from treadle.policy.backends.vision.reader import ImageReader

                reader = ImageReader(model_path, self._model.vision)
                self._images = ImagePacker(reader, self._model.vision, has_tower=True)
            net = Net(load(model_path), chunk=config.logits_chunk_tokens, context=context)
            net.freeze_tower(frozen=config.freeze_vision_tower)
            if config.lora.rank:
                lora.adapt(net, config.lora, self._model.adapted(config.lora), seed=config.seed)
            self._net = spread(net, config)
            self._optimizer = Optimizer(self._net, config.optimizer)
            self._offload = self._offload_of(config.offload, reference=self._other_reference)
            if keep_reference and reference_path is not None:
                self.release_memory()  # the reference may need it
                reference = described.read_model(reference_path)
                if problems := [*described.reference_problems(self._model, reference)]:
                    raise UnsupportedModelError("\n".join(problems))
                model = load(reference_path)
                other = Net(model, chunk=config.logits_chunk_tokens, context=context)
                self._reference = spread(other, config).requires_grad_(requires_grad=False)
            elif keep_reference and not self._begins_bare:
                self._reference = self._copies()
            self.release_memory()
        except BaseException:
            self.close()
            raise

    @property
    def device(self) -> torch.device:
        """See `PolicyBackend.device`."""
        return device()

    @property
    def leads(self) -> bool:
        """See `PolicyBackend.leads`."""
        return self._context.leads

    def share(self, frame: Frame | None) -> Frame:
        """See `PolicyBackend.share`."""
        return share(frame, self._context.siblings)

    def sum_over_shards(self, values_M: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `PolicyBackend.sum_over_shards`."""
        return sum_over_ranks(values_M, speaks=self._context.leads)

    def _trained(self) -> Iterator[Tensor]:
        yield from self._optimizer.shards.values()

    def _other_reference(self) -> Iterator[Tensor]:
        if isinstance(self._reference, Net):
            yield from map(shard, self._reference.parameters())

    # --- computing ---------------------------------------------------------------------------

    def logprobs(
        self, sequences: Sequence[TrainSequence], *, temperature: float = 1.0
    ) -> list[FloatArray]:
        """See `PolicyBackend.logprobs`."""
        self._offload.restore("parameters")
        return self.evaluate(self._net, sequences, temperature)

    def _logprobs(
        self, model: Net, sequences: Sequence[TrainSequence], temperature: float
    ) -> list[FloatArray]:
        return self.evaluate(model, sequences, temperature)

    def _without_adapters(self) -> AbstractContextManager[None]:
        return lora.switched_off(self._net)

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
        batch = self._batch(self._net, sequences, of_tokens)
        computed = to_compute(sequences, loss)
        speaks = self._context.leads
        of_batch = PolicyLoss(loss, batch, computed, keep_tokens=keep_tokens, speaks=speaks)
        count = self.accumulate(batch, computed, of_batch, temperature)
        return lambda: of_batch.reduce(count)

    def work(self) -> ModelWork | None:
        """See `PolicyBackend.work`."""
        return self._net.work(self._model, passes=2 if self._net.lora_scaling else 3)

    # --- weights and checkpoints ---------------------------------------------------------------

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """See `PolicyBackend.weight_specs`."""
        return weights.specs(self._net, self._config.dtype)

    def export_weights(self) -> Iterator[NamedTensor]:
        """See `PolicyBackend.export_weights`."""
        self._offload.restore("parameters")
        return weights.export(self._net, self._config.dtype)

    def save_hf(self, folder: Path) -> None:
        """See `PolicyBackend.save_hf`."""
        everything = chain(self.export_weights(), weights.constants(self._net))
        write_together(everything, folder, like=self._model_path, adapter=self._adapter())

    def _adapter(self) -> adapter.CollectedAdapter | None:
        if not self._net.lora_scaling:
            return None
        self._offload.restore("parameters")
        settings, names = self._config.lora, tuple(self._model.adapted(self._config.lora))
        return adapter.CollectedAdapter(
            tensors=lora.collect(self._net, self._config.dtype),
            settings=adapter.peft_settings(
                settings, names, base=str(self._model_path), sees=self._images is not None
            ),
        )

    def _identity(self) -> dict[str, Any]:
        settings = {"model_type": self._model.model_type, "policy.lora.rank": None}
        if self._net.lora_scaling:
            named = self._net.named_parameters()
            frozen = ((name, shard(p)) for name, p in named if not p.requires_grad)
            settings |= adapter.identity(self._config.lora, frozen, self.device)
        return settings | super()._identity()

    def make_critic(self, config: CriticConfig) -> CriticBackend:
        """See `PolicyBackend.make_critic`."""
        from treadle.policy.backends.fsdp.critic import FsdpCritic

        return FsdpCritic(config, self._config, self._model_path, self._images, self._context)

    def close(self) -> None:
        """See `PolicyBackend.close`."""
        dist.destroy_process_group()
