"""The interface of a policy on one rank, and of the losses that it computes.

A policy lives in one or more *ranks* (processes). Every method of `PolicyBackend` is collective:
each rank calls it with the same arguments, in the same order, and shards the work inside. A rank
that does not make the call leaves the others waiting in a collective operation, so the caller
sends each request to all ranks before it waits for any answer.

Nothing here imports torch or Megatron at run time.

Shape suffixes: L tokens of one sequence, T loss tokens and S samples of one micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from treadle.policy.client.types import StepStats

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from treadle.agent_loop import FloatArray
    from treadle.policy.backends.usage import ModelWork
    from treadle.policy.client.types import (
        LossAggregation,
        LossStats,
        NamedTensor,
        OffloadReport,
        OptimizerStats,
        TensorSpec,
        TrainSequence,
    )
    from treadle.policy.config.critic import CriticConfig
    from treadle.policy.config.policy import AdamSettings


Frame: TypeAlias = bytes | bytearray
"""A part of a batch, as the driver sends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The loss tokens of one micro-batch, [T] each. Flags are bool, other [T] tensors float32.

    Log-probabilities that the sequences do not carry are None, except `old_logprobs_T`, which is
    then `logprobs_T` detached.

    Attributes:
        logprobs_T: Log-probabilities under the policy that is trained; they carry the gradient.
        entropy_T: Entropy of the next-token distribution, in nats; carries the gradient.
        sample_lengths_S: Number of loss tokens of each sample of the micro-batch; above 0. The
            tokens of a sample are adjacent, in its order, and all in this micro-batch.
    """

    logprobs_T: Tensor
    entropy_T: Tensor
    advantages_T: Tensor
    old_logprobs_T: Tensor
    rollout_logprobs_T: Tensor | None
    ref_logprobs_T: Tensor | None
    stale_T: Tensor
    sample_lengths_S: Tensor
    selected_T: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """The loss of each token, before any reduction.

    The backend multiplies `loss_T` by weights that were normalised once over the whole batch, and
    sums. A loss never averages: that is why neither micro-batching nor parallelism changes the
    gradient.

    Attributes:
        metrics_T: Metric name -> detached values, to be averaged over loss tokens.
    """

    loss_T: Tensor
    metrics_T: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks meet: at an address, through a shared file, or, if alone, nowhere.

    Attributes:
        master_port: Rank 0 listens here until all have come. Not used with `shared_file` or by a
            world of one.
        listener: The socket of rank 0 that listens there already, and becomes the store's.
        shared_file: For ranks on one machine: a path that does not exist yet.
        local_rank: Which GPU of its machine this rank uses.
        timeout_s: A collective operation that waits longer for another rank fails.
    """

    rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    listener: int | None = None
    shared_file: Path | None = None
    local_rank: int = 0
    timeout_s: float = 600.0


class LossFn(Protocol):
    """A per-token loss. `treadle.policy.algorithms.losses` has the implementations."""

    @property
    def zero_without_advantage(self) -> bool:
        """Whether a token whose advantage is 0 has gradient 0, so that it can be left out."""
        ...

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns the loss of every token of `inputs`."""
        ...


class TrainedBackend(Protocol):
    """What a policy and its critic have in common, on one rank. Every method is collective."""

    @property
    def step(self) -> int:
        """Optimizer steps since the beginning of training, over all resumes; skipped ones too."""
        ...

    def weights_are_finite(self) -> bool:
        """Returns whether no weight is infinite or NaN; the same on every rank."""
        ...

    def save(self, directory: Path) -> None:
        """Writes a checkpoint to `directory`, which must not exist; all of it or nothing.

        Raises:
            CheckpointError: It could not be written; whatever was there before is untouched.
        """
        ...

    def load(self, directory: Path, *, weights_only: bool = False) -> None:
        """Restores weights, optimizer and step counter, whatever the parallel sizes were.

        Args:
            weights_only: Whether the optimizer and the counter begin again instead.

        Raises:
            CheckpointError: There is no complete checkpoint, or it is of another model, or its
                weights are not finite.
        """
        ...

    def release_memory(self) -> None:
        """Moves the parts named by `policy.offload` off the device until a method needs them."""
        ...

    def take_offload_report(self) -> OffloadReport:
        """Returns what `policy.offload` has moved since the last report."""
        ...


class PolicyBackend(TrainedBackend, Protocol):
    """The policy on one rank. Every method is collective (see the module docstring).

    A backend derives from this class, which has `train_step`.

    A `temperature` divides the logits. Log-probabilities and gradients belong to the distribution
    that was sampled from only if it is the sampling temperature.
    """

    @property
    def device(self) -> torch.device:
        """Where the tensors of `export_weights` are."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of those that compute the same sequences."""
        ...

    def share(self, frame: Frame | None) -> Frame:
        """Returns what the leading rank gives; collective over those with the same sequences.

        Args:
            frame: The leader's bytes; None on the others.
        """
        ...

    def logprobs(
        self, sequences: Sequence[TrainSequence], *, temperature: float = 1.0
    ) -> list[FloatArray]:
        """Returns log-probabilities of the loss tokens under the current policy, 0.0 elsewhere.

        Returns:
            One [L] array per sequence, the same on every rank.
        """
        ...

    def reference_logprobs(
        self, sequences: Sequence[TrainSequence], *, temperature: float = 1.0
    ) -> list[FloatArray]:
        """Returns the same under the frozen reference: the start weights, or another model.

        With LoRA this is the model without its adapters, even if they started from a file.

        Raises:
            RuntimeError: The backend was built without a reference.
        """
        ...

    def sum_over_shards(self, values_M: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns the [M] values of all loss tokens of a batch, added over the ranks' shards.

        Args:
            values_M: 0 for the tokens of outlines (see `shards`).
        """
        ...

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
        """Begins to add the gradient of the aggregated loss to that of the next step.

        The host does not wait for the device. What it returns does, and is called once, at any time
        before the next gradient: it returns the statistics, and is collective.

        Each call normalises the weights of tokens over its own `sequences`. Calls on the parts of a
        batch therefore equal one call on the batch with the aggregation `token-sum`, which does not
        normalise; other weights go into the advantages.

        With `keep_tokens`, the result has what was computed of each loss token.

        Raises:
            ValueError: No sequence has a loss token, or only some have an optional field.
        """
        ...

    def optimizer_step(self, settings: AdamSettings | None = None) -> OptimizerStats:
        """Takes a step with the gradient that was added up, clipped; the next begins at 0.

        Args:
            settings: Settings of this step only; None: those of `policy.optimizer`.

        Raises:
            RuntimeError: There was no `add_gradient` since the last step.
        """
        ...

    def train_step(
        self,
        sequences: Sequence[TrainSequence],
        loss: LossFn,
        *,
        aggregation: LossAggregation = "token-mean",
        aggregation_length: int | None = None,
        temperature: float = 1.0,
        keep_tokens: bool = False,
    ) -> StepStats:
        """Takes one optimizer step on the aggregated loss of all `sequences`.

        See `add_gradient` and `optimizer_step`.
        """
        began = time.perf_counter()
        statistics = self.add_gradient(
            sequences,
            loss,
            aggregation=aggregation,
            aggregation_length=aggregation_length,
            temperature=temperature,
            keep_tokens=keep_tokens,
        )
        applied = self.optimizer_step()
        return step_stats(statistics(), applied, time_s=time.perf_counter() - began)

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """Returns all weights of the model, from all senders; the same on every rank."""
        ...

    def export_weights(self) -> Iterator[NamedTensor]:
        """Yields the weights held by this pipeline stage, in the order of the specs.

        Every rank must run the iterator to its end; only the rank that the specs name as `sender`
        uses what it yields.
        """
        ...

    def save_hf(self, folder: Path) -> None:
        """Writes a Hugging Face model folder, which must not exist; all of it or nothing.

        The weights are those of `export_weights`, bit for bit; configuration, tokenizer and chat
        template are those of the model that training started from. With LoRA the weights have the
        adapter merged into them, and the folder `adapter` has it in PEFT's format.

        Raises:
            CheckpointError: It could not be written; whatever was there before is untouched.
        """
        ...

    def save_adapter(self, folder: Path) -> None:
        """Writes the LoRA adapter in PEFT's format to a folder, which must not exist.

        Raises:
            CheckpointError: It could not be written.
            RuntimeError: The policy has no adapter.
        """
        ...

    def work(self) -> ModelWork | None:
        """Returns what the arithmetic of a step follows from; None where it is not known."""
        return None

    def held_bytes(self) -> Mapping[str, int]:
        """Returns the bytes of parameters, gradients and optimizer on this rank's device."""
        return {}

    def make_critic(self, config: CriticConfig) -> CriticBackend:
        """Loads a critic beside the policy, with its layout; the critic's value head begins at 0.

        Raises:
            RuntimeError: The backend has no critic (see `Capabilities`).
        """
        ...

    def close(self) -> None:
        """Leaves the policy's ranks; the object cannot be used afterwards."""
        ...


class CriticBackend(TrainedBackend, Protocol):
    """The critic on one rank, beside the policy. Every method is collective."""

    def values(self, sequences: Sequence[TrainSequence]) -> list[FloatArray]:
        """Returns the value of the state before each loss token, 0.0 elsewhere.

        Returns:
            One [L] array per sequence, the same on every rank.
        """
        ...

    def train_step(
        self,
        sequences: Sequence[TrainSequence],
        *,
        aggregation: LossAggregation = "token-mean",
        aggregation_length: int | None = None,
    ) -> StepStats:
        """Takes one optimizer step on the value loss of all sequences.

        Raises:
            ValueError: No sequence has a loss token, or one has no values or no returns.
        """
        ...


def step_stats(loss: LossStats, optimizer: OptimizerStats, *, time_s: float) -> StepStats:
    """Returns the statistics of a whole step."""
    parts: dict[str, Any] = {
        each.name: getattr(part, each.name) for part in (loss, optimizer) for each in fields(part)
    }
    return StepStats(**parts | {"time_s": time_s})


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message names the path and the cause."""
