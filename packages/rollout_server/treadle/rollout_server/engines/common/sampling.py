"""The sampler: one token and its log-prob per row of logits, in one vectorised pass.

Invariant: the token of a row depends only on its logits, its settings, its seed and its
position, not on the rest of the batch. There is no generator state: the uniform number of a
token is a hash of (seed, position), SplitMix64 (Steele et al. 2014, doi
10.1145/2660193.2660195), and the token is where the cumulative distribution passes it.

Order of the transforms, as in transformers: repetition penalty, temperature, top-k, top-p,
min-p. The log-prob is that of the resulting distribution; at temperature 0 the distribution is
a single point and the log-prob is 0.

Shapes: B rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from treadle.rollout_server.engine import Sampling
from treadle.rollout_server.sampling_mask import encode

_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny  # A smaller one is flushed to zero.
_LARGEST = torch.finfo(torch.float32).max
_UNIFORM_BITS = 48  # u * total < total then holds in float64, so no id of weight 0 is drawn.


class KeptIds(NamedTuple):
    """The ids that could have been drawn, of R rows of a batch that want them.

    Attributes:
        rows: Indices of these rows in their batch, ascending.
        kept_RV: Flags on the logits' device; none of them is set later.
    """

    rows: list[int]
    kept_RV: torch.Tensor

    def masks(self, token_ids: Sequence[int]) -> list[bytes]:
        """Returns sampling masks, [B], empty ones for other rows; waits for the device.

        Args:
            token_ids: Ids that were drawn, one per row of the batch.
        """
        masks = [b""] * len(token_ids)
        counts = self.kept_RV.sum(-1).tolist()
        ids, vocab_size = self.kept_RV.nonzero()[:, 1].tolist(), self.kept_RV.shape[1]
        first = 0
        for row, count in zip(self.rows, counts, strict=True):
            masks[row] = encode(ids[first : first + count], token_ids[row], vocab_size)
            first += count
        return masks


class DrawnTokens(NamedTuple):
    """One token per row; ``[B]`` each, on the logits' device, log-probs in nats.

    `kept` is None if no row wants a mask.
    """

    ids_B: torch.Tensor
    logprobs_B: torch.Tensor
    kept: KeptIds | None = None


class SampledTokens(NamedTuple):
    """One token per row; ``[B]`` each, log-probs in nats; no masks if no row wants one."""

    token_ids: list[int]
    logprobs: list[float]
    masks: list[bytes]


class SamplingBatch:
    """The sampling settings of a batch as tensors; rebuilt when the rows change.

    Args:
        settings: Array of shape ``[B]``, by sequence.
        seeds: Array of shape ``[B]``, 64 bits each.
        masked: Whether each row wants its sampling masks, ``[B]``; empty: none does.
    """

    def __init__(
        self,
        settings: Sequence[Sampling],
        seeds: Sequence[int],
        device: torch.device,
        masked: Sequence[bool] = (),
    ) -> None:
        self._masked = any(masked)
        self._open = [
            row for row, wants in enumerate(masked) if wants and settings[row].temperature
        ]
        self._seeds = np.array(seeds, dtype=np.uint64)
        greedy = [s.temperature == 0 for s in settings]
        self._all_greedy = all(greedy)
        self._greedy_B = torch.tensor(greedy, device=device) if any(greedy) else None
        temperatures = [max(s.temperature or 1.0, _LEAST_TEMPERATURE) for s in settings]
        self._temperature_B1 = (
            torch.tensor(temperatures, dtype=torch.float32, device=device).unsqueeze(1)
            if any(t != 1.0 for t in temperatures)
            else None
        )
        self._penalised = [
            (row, s.repetition_penalty)
            for row, s in enumerate(settings)
            if s.repetition_penalty != 1.0
        ]
        truncated = [
            (row, s)
            for row, s in enumerate(settings)
            if s.temperature and (s.top_k is not None or s.top_p < 1.0 or s.min_p > 0.0)
        ]
        self._truncation = _Truncation.of(truncated, device) if truncated else None

    def sample(self, logits_BV: torch.Tensor, histories: Sequence[Sequence[int]]) -> SampledTokens:
        """Applies the repetition penalty and samples one token per row.

        Args:
            histories: ``[B]``, ids before the new token, prompt first; the length is the
                position that is hashed.

        Raises:
            FloatingPointError: The logits of a row are not finite.
        """
        for row, penalty in self._penalised:
            _penalise(logits_BV[row], histories[row], penalty)
        drawn = self.draw(logits_BV, [len(history) for history in histories])
        if self._all_greedy:
            _check_finite(logits_BV.gather(1, drawn.ids_B.unsqueeze(1)))
        _check_finite(drawn.logprobs_B)
        ids: list[int] = drawn.ids_B.tolist()
        masks = [] if drawn.kept is None else drawn.kept.masks(ids)
        return SampledTokens(ids, drawn.logprobs_B.tolist(), masks)

    def draw(self, logits_BV: torch.Tensor, positions: Sequence[int]) -> DrawnTokens:
        """Samples one token per row from penalised logits; does not wait for the device.

        Args:
            logits_BV: float32; overwritten. If the logits of a row are not finite, its log-prob
                is not finite either, unless the row is greedy.
            positions: ``[B]``, number of ids before the new token.
        """
        greedy_ids_B = logits_BV.argmax(-1)
        if self._all_greedy:
            zeros_B = torch.zeros_like(greedy_ids_B, dtype=torch.float32)
            return DrawnTokens(greedy_ids_B, zeros_B, self._kept(logits_BV))
        if self._temperature_B1 is not None:
            # Subtract the maximum first: a temperature near zero would give infinite quotients.
            logits_BV -= logits_BV.amax(-1, keepdim=True)
            logits_BV /= self._temperature_B1
        if self._truncation is not None:
            self._truncation.apply(logits_BV)
        kept = self._kept(logits_BV)
        logprobs_BV = logits_BV.log_softmax(-1)
        ids_B = self._draw(logprobs_BV, positions)
        if self._greedy_B is not None:
            ids_B = torch.where(self._greedy_B, greedy_ids_B, ids_B)
        logprobs_B = logprobs_BV.gather(1, ids_B.unsqueeze(1)).squeeze(1)
        if self._greedy_B is not None:
            broken_B = logprobs_B.isnan()
            logprobs_B = logprobs_B.masked_fill(self._greedy_B & ~broken_B, 0.0)
        return DrawnTokens(ids_B, logprobs_B, kept)

    def _kept(self, logits_BV: torch.Tensor) -> KeptIds | None:
        """Returns what truncation left; of greedy rows nothing, as their masks are empty."""
        if not self._masked:
            return None
        return KeptIds(self._open, logits_BV[self._open] > -torch.inf)

    def _draw(self, logprobs_BV: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        numbers = uniform(self._seeds, np.array(positions, dtype=np.uint64))
        uniform_B = torch.from_numpy(numbers).to(logprobs_BV.device, non_blocking=True)
        cumulative_BV = logprobs_BV.exp().cumsum(-1, dtype=torch.float64)
        target_B1 = uniform_B.unsqueeze(1) * cumulative_BV[:, -1:]
        ids_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True)
        # Beyond the end only if the row is NaN, which the caller reports.
        return ids_B1.squeeze(1).clamp_(max=logprobs_BV.shape[1] - 1)


def logprobs_of(logits_RV: torch.Tensor, ids_R: Sequence[int]) -> tuple[float, ...]:
    """Returns the log-probability of an id per row, ``[R]`` nats, at temperature 1.

    Args:
        logits_RV: float32, as the model computed them.

    Raises:
        FloatingPointError: The logits of a row are not finite.
    """
    ids_R1 = torch.tensor(ids_R, device=logits_RV.device).unsqueeze(1)
    logprobs_R = (logits_RV.gather(1, ids_R1) - logits_RV.logsumexp(-1, keepdim=True)).squeeze(1)
    _check_finite(logprobs_R)
    return tuple(logprobs_R.tolist())


def uniform(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Returns a number in [0, 1) per (seed, position): output `position` of SplitMix64(seed)."""
    with np.errstate(over="ignore"):
        z = seeds + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    high = (z >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float64)
    fractions: npt.NDArray[np.float64] = np.ldexp(high, -_UNIFORM_BITS)
    return fractions


def penalised(logits: torch.Tensor, penalty: float) -> torch.Tensor:
    """Returns logits, float32 of any shape, after a repetition penalty; a new tensor."""
    values = torch.where(logits > 0, logits / penalty, logits * penalty)
    # Extreme penalties must not give infinity: the softmax would turn it into NaN.
    return values.clamp_(-_LARGEST, _LARGEST)


def _penalise(logits_V: torch.Tensor, history: Sequence[int], penalty: float) -> None:
    seen = torch.tensor(sorted(set(history)), device=logits_V.device)
    logits_V[seen] = penalised(logits_V[seen], penalty)


class _Truncation(NamedTuple):
    """Settings of top-k, top-p and min-p for some rows; ``[R]`` and ``[R, 1]``."""

    rows_R: torch.Tensor
    top_k_R1: torch.Tensor
    top_p_R1: torch.Tensor
    min_p_R1: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[tuple[int, Sampling]], device: torch.device) -> "_Truncation":
        def column(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

        settings = [setting for _, setting in rows]
        return cls(
            rows_R=torch.tensor([row for row, _ in rows], device=device),
            top_k_R1=column([math.inf if s.top_k is None else s.top_k for s in settings]),
            # Sums of float32 may pass 1 before the last id.
            top_p_R1=column([s.top_p if s.top_p < 1.0 else math.inf for s in settings]),
            min_p_R1=column([s.min_p for s in settings]),
        )

    def apply(self, logits_BV: torch.Tensor) -> None:
        """Sets the logits of dropped ids to minus infinity; always keeps the most likely id."""
        sorted_RV, order_RV = logits_BV[self.rows_R].sort(descending=True, stable=True)
        rank_V = torch.arange(sorted_RV.shape[1], device=logits_BV.device)
        sorted_RV = sorted_RV.masked_fill(rank_V >= self.top_k_R1, -torch.inf)
        probability_RV = sorted_RV.softmax(-1)
        before_RV = probability_RV.cumsum(-1) - probability_RV
        kept_RV = before_RV < self.top_p_R1
        kept_RV &= probability_RV >= self.min_p_R1 * probability_RV[:, :1]
        kept_RV |= rank_V == 0
        sorted_RV = sorted_RV.masked_fill(~kept_RV, -torch.inf)
        logits_BV[self.rows_R] = sorted_RV.scatter(1, order_RV, sorted_RV)


def _check_finite(values: torch.Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise FloatingPointError(
            "the model's logits are not finite: the weights are broken, load other weights"
        )
