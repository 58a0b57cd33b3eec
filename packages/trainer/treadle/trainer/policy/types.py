"""The policy: the model being trained, as the trainer sees it.

Invariant: everything here is plain data and one protocol. Nothing imports torch or Megatron at run
time, so the driver process can build batches and read statistics without either.

A policy lives in one or more *ranks* (processes). Every method of `PolicyBackend` is collective:
each rank calls it with the same arguments, in the same order, and shards the work inside. A rank
that does not make the call leaves the others waiting in a collective operation, so the caller
sends each request to all ranks before it waits for any answer.

Shape suffixes: L tokens of one sequence, T loss tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol, Self

if TYPE_CHECKING:
    from torch import Tensor

ElementType = Literal["float32", "bfloat16"]


LOGPROB_FIELDS: Final = ("rollout_logprobs", "old_logprobs", "ref_logprobs")
"""The optional fields of `TrainSequence`; a batch has each for all of its sequences or for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One sample of a trajectory, ready to be trained on. All tuples are [L], aligned with `ids`.

    Entry t of every log-probability tuple is log p(ids[t] | ids[:t]) in nats. Entries outside
    `loss_mask` are never read.

    Raises:
        ValueError: lengths differ, there are fewer than two ids, or the first token is in the
            loss mask (nothing precedes it, so it has no probability).
    """

    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """True for tokens the policy sampled and is to be trained on."""
    advantages: tuple[float, ...]
    rollout_logprobs: tuple[float, ...] | None = None
    """As the rollout engine reported them when it sampled; None if no engine did."""
    old_logprobs: tuple[float, ...] | None = None
    """The policy that starts this batch of updates, or None: the policy as it is in the step
    itself, which is exact when the batch is used for one update only."""
    ref_logprobs: tuple[float, ...] | None = None
    """The frozen reference policy; needed by losses with a KL term, None otherwise."""
    trajectory: int | None = None
    """Number of the trajectory in its batch that this is a sample of. The samples of one count as
    one sequence in the loss, and stay in one mini-batch. None: it has no other sample."""
    stale: tuple[bool, ...] | None = None
    """True for tokens in which weights older than the policy's had a part: sampled from them, or
    after such a token in one completion, whose cache they made. None: there are none."""

    def __post_init__(self) -> None:
        """Check the alignment that the docstring promises."""
        length = len(self.ids)
        if length < 2:
            raise ValueError(f"a sequence needs at least 2 ids, got {length}")
        for name in ("loss_mask", "advantages", "stale", *LOGPROB_FIELDS):
            values = getattr(self, name)
            if values is not None and len(values) != length:
                raise ValueError(f"{name} has {len(values)} entries for {length} ids")
        if self.loss_mask[0]:
            raise ValueError("loss_mask[0] is True, but the first token has no log-probability")

    @classmethod
    def supervised(cls, ids: Sequence[int], loss_mask: Sequence[bool]) -> Self:
        """A demonstration, for supervised fine-tuning."""
        return cls(ids=tuple(ids), loss_mask=tuple(loss_mask), advantages=(1.0,) * len(ids))

    @property
    def num_loss_tokens(self) -> int:
        """How many tokens are trained on."""
        return sum(self.loss_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one `train_step` did; equal on every rank."""

    step: int
    """Optimizer steps taken so far, this one included; a skipped step is counted."""
    loss: float
    grad_norm: float
    """Before clipping; non-finite exactly when `skipped`."""
    skipped: bool
    """The gradient was not finite: parameters and optimizer state were left as they were."""
    learning_rate: float
    num_sequences: int
    num_computed: int
    """Sequences that went through the model; the others had no gradient to give."""
    num_tokens: int
    """Tokens that went through the model."""
    num_loss_tokens: int
    """Tokens in the loss mask of all sequences, computed or not."""
    num_micro_batches: int
    """Of the rank that had the most."""
    time_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over the loss tokens that were computed, named as they are logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The loss tokens of one micro-batch, [T] each, float32.

    What the sequences do not carry is None, but for `old_logprobs_T`: without them it is
    `logprobs_T` detached.
    """

    logprobs_T: Tensor
    """Of the policy being trained; carries the gradient."""
    entropy_T: Tensor
    """Of the next-token distribution, nats; carries the gradient."""
    advantages_T: Tensor
    old_logprobs_T: Tensor
    rollout_logprobs_T: Tensor | None
    ref_logprobs_T: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """What a loss says about each token, before any reduction.

    The backend multiplies `loss_T` by weights that were normalised once over the whole batch, and
    sums. A loss never averages: that is why neither micro-batching nor parallelism changes the
    gradient.
    """

    loss_T: Tensor
    metrics_T: Mapping[str, Tensor] = field(default_factory=dict)
    """Detached values to be averaged over loss tokens, by metric name."""


class LossFn(Protocol):
    """A per-token loss; implementations are in `treadle.trainer.algorithms.losses`."""

    @property
    def zero_without_advantage(self) -> bool:
        """Whether a token whose advantage is 0 has gradient 0, so that it can be left out."""
        ...

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """The loss of every token of `inputs`."""
        ...


LossAggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One weight as the rollout engine knows it, and the rank that sends it."""

    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    element_type: ElementType
    sender: int
    """Global rank whose `export_weights` yields it for sending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A full weight under its Hugging Face name.

    The data may alias the live parameter: use or copy it before the next `train_step`.
    """

    name: str
    tensor: Tensor


class PolicyBackend(Protocol):
    """The policy on one rank. Every method is collective (see the module docstring).

    Where there is a `temperature`, it divides the logits: log-probabilities and gradients are those
    of the distribution that was sampled from only if it is the sampling temperature.
    """

    @property
    def step(self) -> int:
        """Optimizer steps taken since the beginning of training, over all resumes."""
        ...

    def logprobs(
        self, sequences: Sequence[TrainSequence], *, temperature: float = 1.0
    ) -> list[tuple[float, ...]]:
        """Log-probabilities of the loss tokens under the current policy, 0.0 elsewhere.

        Returns:
            One [L] tuple per sequence, the same on every rank.
        """
        ...

    def reference_logprobs(
        self, sequences: Sequence[TrainSequence], *, temperature: float = 1.0
    ) -> list[tuple[float, ...]]:
        """The same under the frozen weights that training started from.

        Raises:
            RuntimeError: the backend was built without a reference.
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
    ) -> StepStats:
        """One optimizer step on the gradient of the aggregated loss over all `sequences`."""
        ...

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """All weights of the model, from all senders; the same on every rank."""
        ...

    def export_weights(self) -> Iterator[NamedTensor]:
        """The weights held by this pipeline stage, one at a time, in the order of the specs.

        Every rank must run the iterator to its end; only the rank named as `sender` in the specs
        has use for what it yields.
        """
        ...

    def save(self, directory: Path) -> None:
        """Write a checkpoint to `directory`, which must not exist; all of it or nothing.

        Raises:
            CheckpointError: it could not be written; whatever was there before is untouched.
        """
        ...

    def load(self, directory: Path) -> None:
        """Restore weights, optimizer and step counter, whatever the parallel sizes were then.

        Raises:
            CheckpointError: there is no complete checkpoint, or it is of another model.
        """
        ...


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message names the path and the cause."""
