"""A model with its gradient and its optimizer: what policies and critics of all backends share.

Between calls it holds parameters, optimizer state and, after `forward_backward`, a gradient. What
`policy.offload` takes off the device is restored by the call that needs it, and leaves at
`release_memory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from treadle.policy.backend import CheckpointError
from treadle.policy.client.types import OptimizerStats
from treadle.policy.rank_time import spent_on

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.policy.backends.offload import Offload
    from treadle.policy.client.types import OffloadReport
    from treadle.policy.config.policy import AdamSettings, OptimizerConfig


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
        return self._offload.held_bytes()

    def optimizer_step(self, settings: AdamSettings | None = None) -> OptimizerStats:
        """See `PolicyBackend.optimizer_step`."""
        if not self._has_gradient:
            raise RuntimeError("there is no gradient: call forward_backward before optimizer_step")
        self._has_gradient = False
        self._offload.restore("parameters", "gradients")
        self._reduce_gradients()
        settings = settings or self._settings.at_step(self._step)
        self._offload.restore("optimizer")
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
