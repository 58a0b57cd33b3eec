"""Sampling in a worker: the rows of a batch, their positions and the ids they have seen.

Invariant: the token of a row depends only on its logits, its settings, its seed and its
position, not on the rest of the batch; `engines/common/sampling.py` samples, as for the other
engines. SGLang's own sampler is not used because it reports log-probs from before truncation,
crashes if a seed is combined with min-p, supports penalties up to 2 only, and applies them to
the completion without the prompt.

A row's position is its count of samples, and the seen ids stay on the logits' device, so nothing
here waits for a GPU and the scheduler can run ahead. The sampler of `worker.py` calls this once
per step.

Shapes: B rows of a batch, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch

from treadle.rollout_server.engine import Sampling
from treadle.rollout_server.engines.common.sampling import (
    DrawnTokens,
    KeptIds,
    SamplingBatch,
    penalised,
)

_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def to_wire(sampling: Sampling, seed: int, *, masked: bool = False) -> dict[str, Any]:
    """Encodes the sampling settings that a worker needs; they travel with the request.

    Args:
        sampling: Sampling settings of the request.
        seed: 64 bits; random if the request has none.
        masked: Whether the request wants sampling masks.
    """
    settings = {name: getattr(sampling, name) for name in _SETTINGS}
    return settings | {"seed": seed, "masked": masked}


class SampledRow:
    """One sequence in a batch.

    Args:
        history: Ids so far, prompt first.
        vocab_size: Upper bound of token ids.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        history: Sequence[int],
        *,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        chosen = {name: settings[name] for name in _SETTINGS}
        self.sampling = Sampling(max_tokens=1, **chosen)
        self.seed: int = settings["seed"]
        self.masked: bool = settings["masked"]
        self.position = len(history)
        self.seen_V: torch.Tensor | None = None
        if self.sampling.repetition_penalty != 1.0:
            self.seen_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.seen_V[torch.tensor(sorted(set(history)), device=device)] = True

    def penalise(self, logits_V: torch.Tensor) -> None:
        """Applies the repetition penalty to the seen ids, in place."""
        assert self.seen_V is not None
        penalised_V = penalised(logits_V, self.sampling.repetition_penalty)
        logits_V.copy_(torch.where(self.seen_V[: len(logits_V)], penalised_V, logits_V))


class Rows:
    """The rows of a batch; rebuilt when the batch changes."""

    def __init__(self, rows: Sequence[SampledRow]) -> None:
        self.rows = tuple(rows)
        self._penalised = [(i, row) for i, row in enumerate(rows) if row.seen_V is not None]
        self._batch: SamplingBatch | None = None

    def kept(self, indices: Sequence[int]) -> "Rows":
        """Returns the rows with these indices, in this order."""
        return Rows([self.rows[index] for index in indices])

    def joined(self, others: "Rows") -> "Rows":
        """Returns these rows, then the others."""
        return Rows([*self.rows, *others.rows])

    def draw(self, logits_BV: torch.Tensor) -> DrawnTokens:
        """Samples one token per row and marks it as seen; does not wait for the device.

        Args:
            logits_BV: Overwritten if float32. If the logits of a row are not finite, its
                log-prob is not finite either.
        """
        logits_BV = logits_BV.float()
        if self._batch is None:
            settings = [row.sampling for row in self.rows]
            seeds = [row.seed for row in self.rows]
            masked = [row.masked for row in self.rows]
            self._batch = SamplingBatch(settings, seeds, logits_BV.device, masked)
        for index, row in self._penalised:
            row.penalise(logits_BV[index])
        peak_B = logits_BV.amax(-1)
        drawn = self._batch.draw(logits_BV, [row.position for row in self.rows])
        for row in self.rows:
            row.position += 1
        for index, row in self._penalised:
            assert row.seen_V is not None
            row.seen_V.index_fill_(0, drawn.ids_B[index : index + 1], True)
        # The log-prob of a greedy row is 0 even if its logits are not finite.
        return drawn._replace(logprobs_B=drawn.logprobs_B + (peak_B - peak_B))


class LateMasks:
    """The sampling masks of a batch by its rows; made when the first is read, from the device."""

    def __init__(self, kept: KeptIds, ids_B: torch.Tensor) -> None:
        self._kept, self._ids_B = kept, ids_B
        self._masks: list[bytes] | None = None

    def __getitem__(self, row: int) -> bytes:
        if self._masks is None:
            self._masks = self._kept.masks(self._ids_B.tolist())
        return self._masks[row]
