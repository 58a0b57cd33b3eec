"""Plans a batch: the rank, micro-batch and loss weight of each sequence.

Invariant: a plan is a pure function of the lengths, so all ranks make the same one without
communication; it only decides where work happens. The weights are normalised over the whole batch
before it is split, so no split changes the gradient.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, assert_never

import numpy as np

from treadle.policy.client.types import LOGPROB_FIELDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from treadle.agent_loop import FloatArray
    from treadle.policy.client.types import LossAggregation, TrainSequence
    from treadle.policy.config.policy import PolicyConfig


def check_optional_fields(sequences: Sequence[TrainSequence]) -> None:
    """Raises `ValueError` if only some sequences have `selected` or an optional log-probability."""
    for name in (*LOGPROB_FIELDS, "selected"):
        having = sum(getattr(sequence, name) is not None for sequence in sequences)
        if having not in (0, len(sequences)):
            raise ValueError(
                f"{having} of {len(sequences)} sequences have {name}; give all or none"
            )


def token_weights(
    sequences: Sequence[TrainSequence],
    aggregation: LossAggregation,
    aggregation_length: int | None = None,
) -> list[float]:
    """Returns the weight of a loss token per sequence: the loss is the weighted sum over tokens.

    A trajectory counts as one sequence, however many samples it was split into, so that no split
    changes a weight. With n trajectories that have loss tokens, m_i loss tokens in trajectory i,
    and M in total:

    - token-mean: 1 / M (DAPO, arXiv:2503.14476, equation 8).
    - token-sum: 1.
    - seq-mean-token-sum: 1 / n.
    - seq-mean-token-mean: 1 / (n m_i) (GRPO, arXiv:2402.03300, equation 3).
    - seq-mean-token-sum-norm: 1 / (n aggregation_length) (Dr. GRPO, arXiv:2503.20783, section 3.2).

    Raises:
        ValueError: No sequence has a loss token.
    """
    owners = [(s.trajectory, i if s.trajectory is None else 0) for i, s in enumerate(sequences)]
    of_owner: Counter[tuple[int | None, int]] = Counter()
    for owner, sequence in zip(owners, sequences, strict=True):
        of_owner[owner] += sequence.num_loss_tokens
    counts = [of_owner[owner] for owner in owners]
    total, trained = of_owner.total(), sum(1 for count in of_owner.values() if count)
    if not total:
        raise ValueError(f"none of the {len(sequences)} sequences has a token in its loss mask")
    match aggregation:
        case "token-mean":
            return [1.0 / total] * len(counts)
        case "token-sum":
            return [1.0] * len(counts)
        case "seq-mean-token-sum":
            return [1.0 / trained] * len(counts)
        case "seq-mean-token-mean":
            return [1.0 / (trained * count) if count else 0.0 for count in counts]
        case "seq-mean-token-sum-norm":
            if aggregation_length is None:
                raise ValueError("seq-mean-token-sum-norm needs aggregation_length")
            return [1.0 / (trained * aggregation_length)] * len(counts)
    assert_never(aggregation)


def cut(sequences: Sequence[TrainSequence], parts: int) -> list[Sequence[TrainSequence]]:
    """Cuts into contiguous parts, none empty, whose numbers of trajectories differ by at most 1."""
    starts = [
        index
        for index, sequence in enumerate(sequences)
        if index == 0
        or sequence.trajectory is None
        or sequence.trajectory != sequences[index - 1].trajectory
    ]
    parts = min(parts, len(starts))
    firsts = [starts[len(starts) * part // parts] for part in range(parts)]
    return [sequences[start:stop] for start, stop in itertools.pairwise((*firsts, len(sequences)))]


def of_loss_tokens(
    sequences: Sequence[TrainSequence], values: bytes | NDArray[np.float32]
) -> list[FloatArray]:
    """Returns [M] numbers of all loss tokens as [L] of each sequence."""
    values_M = np.frombuffer(values, "<f4") if isinstance(values, bytes) else values
    ends = np.cumsum([sequence.num_loss_tokens for sequence in sequences])[:-1]
    parts = np.split(values_M, ends)
    return [sequence.aligned(each) for sequence, each in zip(sequences, parts, strict=True)]


def input_length(sequence: TrainSequence) -> int:
    """Returns the number of tokens to run through the model: all before the last loss token."""
    positions = sequence.loss_positions
    return int(positions[-1]) if len(positions) else 0


class MicroBatchRoom:
    """Finds sequences longer than a micro-batch; reports them once, and after 25 % growth again."""

    def __init__(self, config: PolicyConfig) -> None:
        self._room = self._told = config.micro_batch_tokens * config.parallel.context
        self._context = config.parallel.context

    def too_long(self, sequences: Sequence[TrainSequence]) -> str | None:
        """Returns the warning for a batch; None if no sequence is too long or much longer yet."""
        lengths = [input_length(sequence) for sequence in sequences]
        longest = max(lengths, default=0)
        if longest <= self._told:
            return None
        self._told = longest * 5 // 4
        times = "" if self._context == 1 else " x policy.parallel.context"
        return (
            f"{sum(length > self._room for length in lengths)} of {len(lengths)} sequences are "
            f"longer than the {self._room} tokens of a micro-batch "
            f"(policy.micro_batch_tokens{times}), up to {longest}: each is a micro-batch of its "
            f"own, which takes {longest / self._room:.1f} times the memory that this setting is to "
            "bound; lower rollout.response_length, raise policy.parallel.context, or set "
            "policy.recompute"
        )


def has_gradient(sequence: TrainSequence) -> bool:
    """Returns whether any loss token has an advantage other than 0."""
    if isinstance(sequence.advantages, float):
        return bool(sequence.advantages) and sequence.num_loss_tokens > 0
    return bool(sequence.at_loss_tokens("advantages").any())


def balance(lengths: Sequence[int], num_shards: int) -> list[list[int]]:
    """Splits indices so that the sums of lengths are close: longest first, to the lightest shard.

    Graham's LPT rule: the heaviest shard is at most 4/3 of the best possible. Shards may be empty.
    """
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    loads = [(0, shard) for shard in range(num_shards)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, shard = heapq.heappop(loads)
        shards[shard].append(index)
        heapq.heappush(loads, (load + lengths[index], shard))
    return [sorted(shard) for shard in shards]


def pack(lengths: Sequence[int], *, max_tokens: int, at_least: int = 1) -> list[list[int]]:
    """Puts indices into micro-batches of at most `max_tokens`; each is in ascending length.

    A sequence longer than `max_tokens` is its own micro-batch. The number of micro-batches is
    that of first-fit in descending length; they are then balanced, so that none is nearly empty.

    Args:
        lengths: Number of tokens per sequence, at least 1.
        max_tokens: Maximum number of tokens in a micro-batch.
        at_least: Minimum number of micro-batches, if there are enough sequences: a pipeline of n
            stages idles with fewer than n.
    """
    if not lengths:
        return []
    fits = max(_first_fit(lengths, max_tokens), min(at_least, len(lengths)))
    packs = balance(lengths, fits)
    while any(len(p) > 1 and sum(lengths[i] for i in p) > max_tokens for p in packs):
        fits += 1  # balancing may overfill where first-fit did not; more bins always end it
        packs = balance(lengths, fits)
    return [sorted(p, key=lambda i: (lengths[i], i)) for p in packs if p]


def _first_fit(lengths: Sequence[int], max_tokens: int) -> int:
    bins: list[int] = []
    for length in sorted(lengths, reverse=True):
        for number, load in enumerate(bins):
            if load + length <= max_tokens:
                bins[number] = load + length
                break
        else:
            bins.append(length)
    return len(bins)
