"""Tokens of one step: a row of logits per last token, and one per token of its draft.

Invariant: a sequence gets the tokens that it would get one by one. A row is drawn with the
sequence's own seed and settings, and with the ids before it; rows after the first token that
differs from the draft have other ids before them, and are dropped.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Ids
from itertools import groupby
from typing import NamedTuple

import torch

from treadle.rollout_server.engines.common.sampling import SamplingBatch
from treadle.rollout_server.engines.torch.sequence import Sequence


class Drawn(NamedTuple):
    """A token with its log-probability, nats, and its sampling mask, empty unless wanted."""

    token_id: int
    logprob: float
    mask: bytes


class StepSampler:
    """Draws tokens, and keeps the settings of the last rows as tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._batch: tuple[list[Sequence], SamplingBatch] | None = None

    def draw(
        self, rows: list[Sequence], logits_BV: torch.Tensor
    ) -> Iterator[tuple[Sequence, list[Drawn]]]:
        """Draws a token per row; yields those of each sequence that its draft leads to.

        Args:
            rows: ``[B]``, the sequence of each row; those of a sequence are neighbours.
            logits_BV: Logits of the model in float32, which are overwritten.

        Raises:
            FloatingPointError: The logits of a row are not finite.
        """
        if self._batch is None or self._batch[0] != rows:
            settings = [sequence.request.sampling for sequence in rows]
            seeds = [sequence.seed for sequence in rows]
            masked = [sequence.request.sampling_mask for sequence in rows]
            self._batch = (rows, SamplingBatch(settings, seeds, self._device, masked))
        histories: list[Ids[int]] = []
        counts = [(sequence, len(list(group))) for sequence, group in groupby(rows)]
        for sequence, count in counts:
            histories += (_history(sequence, index) for index in range(count))
        ids, logprobs, masks = self._batch[1].sample(logits_BV, histories)
        row = 0
        for sequence, count in counts:
            draft = sequence.draft
            kept = 1
            while kept < count and ids[row + kept - 1] == draft[kept - 1]:
                kept += 1
            places = range(row, row + kept)
            yield (
                sequence,
                [Drawn(ids[i], logprobs[i], masks[i] if masks else b"") for i in places],
            )
            row += count

    def forget(self) -> None:
        """Drops the rows, whose sequences may have ended."""
        self._batch = None


def _history(sequence: Sequence, drafted: int) -> Ids[int]:
    """Returns the ids before a row: all of the sequence, and the first ones of its draft."""
    if not drafted:
        return sequence.ids
    if sequence.request.sampling.repetition_penalty == 1.0:
        return range(len(sequence.ids) + drafted)  # Only the length matters.
    return [*sequence.ids, *sequence.draft[:drafted]]
