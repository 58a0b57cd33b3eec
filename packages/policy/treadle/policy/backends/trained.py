"""A model with its gradient and its optimizer: what policies and critics of all backends share.

Between calls it holds parameters, optimizer state and, after `add_gradient`, a gradient. What
`policy.offload` takes off the device is restored by the call that needs it, and leaves at
`release_memory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from treadle.policy.backend import CheckpointError
from treadle.policy.backends.offload import copied
from treadle.policy.backends.ranks import save_folder
from treadle.policy.client.types import OptimizerStats
from treadle.policy.rank_time import spent_on

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.agent_loop import FloatArray
    from treadle.policy.backends.adapter import CollectedAdapter
    from treadle.policy.backends.offload import Offload
    from treadle.policy.client.types import OffloadReport, TrainSequence
    from treadle.policy.config.policy import AdamSettings, OptimizerConfig, PolicyConfig


class ModelOptimizer(Protocol):
    """The optimizer of one rank's share of a model."""

    def apply(self, settings: AdamSettings) -> tuple[float, bool]:
        """Updates the parameters with the gradient that was added up, clipped; collective.

        Returns:
            The norm of the whole model's gradient before clipping, and whether it was applied.
        """
        ...

    def reset(self) -> None:
        """Begins again with its state, as it was before the first step."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """Yields its state on the device; some may be views of the model's parameters."""
        ...


class Trained:
    """See the module. A class that derives from it sets the attributes."""

    _optimizer: ModelOptimizer
    _offload: Offload
    _settings: OptimizerConfig
    _step = 0
    _has_gradient = False
    _held: Mapping[str, int] = MappingProxyType({})

    @property
    def step(self) -> int:
        """See `PolicyBackend.step`."""
        return self._step

    def release_memory(self) -> None:
        """See `PolicyBackend.release_memory`."""
        self._offload.release_all(keep_gradients=self._has_gradient)

    def take_offload_report(self) -> OffloadReport:
        """See `PolicyBackend.take_offload_report`."""
        return self._offload.take_report()

    def held_bytes(self) -> Mapping[str, int]:
        """See `PolicyBackend.held_bytes`."""
        return self._held

    def optimizer_step(self, settings: AdamSettings | None = None) -> OptimizerStats:
        """See `PolicyBackend.optimizer_step`."""
        if not self._has_gradient:
            raise RuntimeError("there is no gradient: call add_gradient before optimizer_step")
        self._has_gradient = False
        self._offload.restore("parameters", "gradients")
        self._reduce_gradients()
        settings = settings or self._settings.at_step(self._step)
        self._offload.restore("optimizer")
        self._held = self._offload.held_bytes()  # all is there: gradients go with the step
        with spent_on("optimizer"):
            norm, applied = self._optimizer.apply(settings)
        self._offload.release("optimizer")
        self._step += 1
        return OptimizerStats(
            step=self._step, grad_norm=norm, skipped=not applied, learning_rate=settings.lr
        )

    def load(self, directory: Path, *, weights_only: bool = False) -> None:
        """See `PolicyBackend.load`."""
        self._has_gradient = False
        self._offload.restore("parameters", "optimizer")
        self._step = self._read(directory)
        if weights_only:
            self._optimizer.reset()
            self._step = 0
        if not self.weights_are_finite():
            raise CheckpointError(f"the weights in {directory} are not finite")

    def _reduce_gradients(self) -> None:
        """Adds up what ranks have of the gradient, where the backward pass has not; collective."""

    def _read(self, directory: Path) -> int:
        """Fills weights and optimizer from a checkpoint; returns the step it was written at."""
        raise NotImplementedError

    def weights_are_finite(self) -> bool:
        """See `PolicyBackend.weights_are_finite`."""
        raise NotImplementedError


class TrainedPolicy(Trained):
    """What policies have besides: a reference, and an adapter to write.

    The reference is another model, or a copy of what is trained, or the model without the adapters
    that the run began with, which needs no copy.
    """

    _config: PolicyConfig
    _reference: Any = None

    @property
    def _begins_bare(self) -> bool:
        return bool(self._config.lora.rank) and self._config.lora.path is None

    def _copies(self) -> list[Tensor]:
        """Returns what is trained, as it is now."""
        to_host = self._config.offload.reference
        return [copied(own, to_host=to_host) for own in self._trained()]

    @torch.no_grad()
    def reference_logprobs(
        self, sequences: Sequence[TrainSequence], *, temperature: float = 1.0
    ) -> list[FloatArray]:
        """See `PolicyBackend.reference_logprobs`."""
        if isinstance(self._reference, torch.nn.Module):
            self._offload.restore("reference")
            try:
                return self._logprobs(self._reference, sequences, temperature)
            finally:
                self._offload.release("reference")
        if self._begins_bare:
            with self._without_adapters():
                return self.logprobs(sequences, temperature=temperature)
        if self._reference is None:
            raise RuntimeError("this policy keeps no reference; build it with keep_reference=True")
        self._offload.restore("parameters")
        trained, current = list(self._trained()), self._copies()
        try:
            torch._foreach_copy_(trained, self._reference)
            return self.logprobs(sequences, temperature=temperature)
        finally:
            torch._foreach_copy_(trained, current)

    def save_adapter(self, folder: Path) -> None:
        """See `PolicyBackend.save_adapter`."""
        if (collected := self._adapter()) is None:
            raise RuntimeError("this policy has no adapter; build it with policy.lora.rank")
        save_folder(collected.write, folder)

    def logprobs(
        self, sequences: Sequence[TrainSequence], *, temperature: float = 1.0
    ) -> list[FloatArray]:
        """See `PolicyBackend.logprobs`."""
        raise NotImplementedError

    def _logprobs(
        self, model: Any, sequences: Sequence[TrainSequence], temperature: float
    ) -> list[FloatArray]:
        """Returns the log-probabilities of a model that is not trained."""
        raise NotImplementedError

    def _trained(self) -> Iterator[Tensor]:
        """Yields this rank's part of what is trained, on the device."""
        raise NotImplementedError

    def _without_adapters(self) -> AbstractContextManager[None]:
        """Returns what switches adapters off."""
        raise NotImplementedError

    def _adapter(self) -> CollectedAdapter | None:
        """Returns the adapter, whole on rank 0, None without LoRA; collective."""
        raise NotImplementedError
