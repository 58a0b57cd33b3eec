"""The data that the driver and the policy ranks share: sequences, statistics, weights.

Everything here is plain data. Nothing imports torch or Megatron at run time, so that the driver
builds batches and reads statistics without either. `backend.py` has the interface of a policy.

Shape suffixes: L tokens of one sequence, M loss tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from treadle.agent_loop import BoolArray, FloatArray, IntArray
from treadle.policy.config.choices import ElementType as ElementType
from treadle.policy.config.choices import LossAggregation as LossAggregation
from treadle.policy.config.choices import SharePrefixes as SharePrefixes
from treadle.policy.v1 import training_service_pb2 as pb

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from treadle.agent_loop import PlacedImage, RoutedExperts

LOGPROB_FIELDS: Final = ("rollout_logprobs", "old_logprobs", "ref_logprobs")
"""Optional fields of `TrainSequence`; a batch has each for all of its sequences or for none."""

FLOAT_FIELDS: Final = (*LOGPROB_FIELDS, "values", "returns")
"""Optional fields of `TrainSequence` with one number per token."""

FLAG_FIELDS: Final = ("stale", "selected")
"""Optional fields of `TrainSequence` with one flag per token."""


# --- what a step takes and gives -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class TrainSequence:
    """One sample of a trajectory, ready for training. All arrays are [L], aligned with `ids`.

    Entry t of the log-probabilities is log p(ids[t] | ids[:t]) in nats. Entries outside
    `loss_mask` are never read. Args are any sequences of numbers, which become arrays; numbers are
    float32. The memory of `Tokens` is shared, so a sequence adds little more than its mask to it.

    Attributes:
        loss_mask: True for tokens that the policy sampled and that are trained on.
        advantages: Advantage per token; one number if all tokens have the same.
        rollout_logprobs: Log-probabilities that the rollout engine reported when it sampled; None
            if no engine did.
        old_logprobs: Log-probabilities of the policy at the start of this batch of updates. None
            means the policy in the step itself, which is exact if the batch is used for one update
            only.
        ref_logprobs: Log-probabilities of the frozen reference policy. Losses with a KL term need
            them; otherwise None.
        trajectory: Number of the sample's trajectory in the batch. The samples of one trajectory
            count as one sequence in the loss and stay in one mini-batch. None means that the
            trajectory has no other sample.
        stale: True for tokens that depend on older weights than the policy's: sampled from them,
            or after such a token in the same completion, whose cache they filled. None means that
            there are none.
        selected: True for tokens that `algorithms.token_selection` chose in the whole mini-batch.
            Losses of covariances need them; otherwise None.
        values: The critic's, of the state before each loss token, at the start of this batch of
            updates; None without a critic.
        returns: The critic's targets; None without a critic.
        routed_experts: The experts that the rollout engine chose, of rows from 0 on, at most L. The
            policy replays them; it chooses for the other rows itself. None: for all.
        sampling_masks: [L], as `Tokens` has them. The log-probability and the entropy of a loss
            token, also under the reference, are of the distribution over the ids that its mask
            keeps. Empty: over the whole vocabulary.
        images: In the order of their places, which lie within the ids and outside the loss mask.
            Sequences that show one image share the object, so that it travels once.
        shard: The data-parallel group that computes it; None: each rank has the whole batch, and
            plans alone. A batch has it for all of its sequences or for none.
        is_outline: Whether this rank has the sequence without its values (see `shards`).

    Raises:
        ValueError: Lengths differ, there are fewer than two ids, the first token is in the loss
            mask (nothing precedes it, so it has no probability), or an image is where none can be.
    """

    ids: IntArray
    loss_mask: BoolArray
    advantages: float | FloatArray
    rollout_logprobs: FloatArray | None = None
    old_logprobs: FloatArray | None = None
    ref_logprobs: FloatArray | None = None
    trajectory: int | None = None
    stale: BoolArray | None = None
    selected: BoolArray | None = None
    values: FloatArray | None = None
    returns: FloatArray | None = None
    routed_experts: RoutedExperts | None = None
    sampling_masks: tuple[bytes, ...] = ()
    images: tuple[PlacedImage, ...] = ()
    shard: int | None = None
    is_outline: bool = False

    def __init__(
        self,
        *,
        ids: Sequence[int],
        loss_mask: Sequence[bool],
        advantages: float | Sequence[float],
        rollout_logprobs: Sequence[float] | None = None,
        old_logprobs: Sequence[float] | None = None,
        ref_logprobs: Sequence[float] | None = None,
        trajectory: int | None = None,
        stale: Sequence[bool] | None = None,
        selected: Sequence[bool] | None = None,
        values: Sequence[float] | None = None,
        returns: Sequence[float] | None = None,
        routed_experts: RoutedExperts | None = None,
        sampling_masks: tuple[bytes, ...] = (),
        images: tuple[PlacedImage, ...] = (),
        shard: int | None = None,
        is_outline: bool = False,
    ) -> None:
        given = {
            "ids": IntArray.of(ids),
            "loss_mask": BoolArray.of(loss_mask),
            "advantages": advantages if isinstance(advantages, float) else _floats(advantages),
            "rollout_logprobs": _floats(rollout_logprobs),
            "old_logprobs": _floats(old_logprobs),
            "ref_logprobs": _floats(ref_logprobs),
            "trajectory": trajectory,
            "stale": None if stale is None else BoolArray.of(stale),
            "selected": None if selected is None else BoolArray.of(selected),
            "values": _floats(values),
            "returns": _floats(returns),
            "routed_experts": routed_experts,
            "sampling_masks": sampling_masks,
            "images": images,
            "shard": shard,
            "is_outline": is_outline,
        }
        for name, value in given.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        """Checks the alignment that the docstring promises."""
        length = len(self.ids)
        if length < 2:
            raise ValueError(f"a sequence needs at least 2 ids, got {length}")
        for name in ("loss_mask", "advantages", *FLAG_FIELDS, *FLOAT_FIELDS):
            entries = getattr(self, name)
            if entries is None or isinstance(entries, float):
                continue
            if len(entries) != length:
                raise ValueError(f"{name} has {len(entries)} entries for {length} ids")
        if self.sampling_masks and len(self.sampling_masks) != length:
            raise ValueError(f"{length} ids have {len(self.sampling_masks)} sampling masks")
        if self.loss_mask[0]:
            raise ValueError("loss_mask[0] is True, but the first token has no log-probability")
        done = 0
        for placed in self.images:
            if not done <= placed.start < placed.stop <= length:
                raise ValueError(
                    f"an image is at [{placed.start}, {placed.stop}); it must lie in "
                    f"[{done}, {length}), behind the image before it"
                )
            if any(self.loss_mask[placed.start : placed.stop]):
                raise ValueError(f"the image at {placed.start} has ids in the loss mask")
            done = placed.stop

    @property
    def loss_positions(self) -> NDArray[np.intp]:
        """Where the loss tokens are, in ascending order."""
        return np.flatnonzero(np.asarray(self.loss_mask))

    def at_loss_tokens(self, name: str) -> NDArray[np.float32]:
        """Returns the entries of a field of numbers, or `advantages`, at the loss tokens."""
        entries = getattr(self, name)
        if isinstance(entries, float):
            return np.full(self.num_loss_tokens, entries, dtype=np.float32)
        found: NDArray[np.float32] = np.asarray(entries, dtype=np.float32)[self.loss_positions]
        return found

    def flags_at_loss_tokens(self, name: str) -> NDArray[np.bool_]:
        """Returns the entries of a field of flags at the loss tokens; False where it is None."""
        entries = getattr(self, name)
        if entries is None:
            return np.zeros(self.num_loss_tokens, dtype=np.bool_)
        found: NDArray[np.bool_] = np.asarray(entries, dtype=np.bool_)[self.loss_positions]
        return found

    @property
    def masks_at_loss_tokens(self) -> list[bytes]:
        """The sampling masks of the loss tokens; empty if the sequence has none."""
        if not self.sampling_masks:
            return []
        return [self.sampling_masks[position] for position in self.loss_positions]

    def aligned(self, numbers: NDArray[np.floating]) -> FloatArray:
        """Returns [L] numbers: those given at the loss tokens, 0.0 at the others."""
        placed = np.zeros(len(self.ids), dtype=np.float32)
        placed[self.loss_positions] = numbers
        return FloatArray.of_buffer(placed.data)

    @property
    def num_loss_tokens(self) -> int:
        """Number of tokens that are trained on."""
        return int(np.count_nonzero(np.asarray(self.loss_mask)))


def _floats(values: Sequence[float] | None) -> FloatArray | None:
    return None if values is None else FloatArray.of(values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenValues:
    """The policy's values of each loss token of a batch, in the order of its sequences.

    Attributes:
        logprobs_M: Log-probabilities, nats; NaN where the sequence did not go through the model.
        entropy_M: Entropy of the next-token distribution, nats; NaN likewise.
    """

    logprobs_M: NDArray[np.float32]
    entropy_M: NDArray[np.float32]

    @classmethod
    def of(cls, message: pb.TokenValues) -> Self:
        """Returns the values in a message of a rank."""
        return cls(
            logprobs_M=np.frombuffer(message.logprobs, "<f4"),
            entropy_M=np.frombuffer(message.entropy, "<f4"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossStats:
    """The statistics of one `add_gradient`; equal on every rank.

    Attributes:
        num_computed: Sequences that went through the model; the others had no gradient to give.
        num_tokens: Tokens of the sequences that went through the model.
        num_rows: Rows that the model computed for them: fewer than tokens where prefixes are
            shared, more by the padding that sequence parallelism needs.
        num_loss_tokens: Tokens in the loss masks of all sequences, computed or not.
        num_micro_batches: Micro-batches of the rank with the most.
        metrics: Means over the loss tokens that were computed, by the name they are logged under;
            `moe/...` over all rows that were computed.
        tokens: Log-probability and entropy of each loss token, with `keep_tokens`.
    """

    loss: float
    num_sequences: int
    num_computed: int
    num_tokens: int
    num_rows: int
    num_loss_tokens: int
    num_micro_batches: int
    time_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    tokens: TokenValues | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStats:
    """The result of one `optimizer_step`; equal on every rank.

    Attributes:
        step: Optimizer steps taken so far, including this one; a skipped step counts.
        grad_norm: Before clipping; non-finite exactly when `skipped`.
        skipped: The gradient was not finite, so parameters and optimizer state are unchanged.
    """

    step: int
    grad_norm: float
    skipped: bool
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats(LossStats):
    """The result of one `train_step`; see `LossStats` and `OptimizerStats`."""

    step: int
    grad_norm: float
    skipped: bool
    learning_rate: float


# --- weights -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One weight under its name in the rollout engine, and the rank that sends it.

    Attributes:
        sender: Global rank that sends what its `export_weights` yields.
    """

    name: str
    shape: tuple[int, ...]
    element_type: ElementType
    sender: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A whole weight under its Hugging Face name.

    The data may alias the live parameter: use or copy it before the next `train_step`.
    """

    name: str
    tensor: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadReport:
    """Bytes that one rank has off its device, and the time that moving them took.

    Attributes:
        release_s: Seconds in which device memory was released.
        restore_s: Seconds in which it was filled again.
        freed_bytes: Device memory that is released now.
        host_bytes: Host memory that holds what was in it.
    """

    release_s: float
    restore_s: float
    freed_bytes: int
    host_bytes: int
