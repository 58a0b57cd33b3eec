"""How sequences become the input of a forward pass, and which sequences a pass has.

A model whose layers can tell packed sequences apart gets them end to end in one row; any other gets
each sequence in a row of its own, filled up at its end, which nothing before it sees.

Shape suffixes: B rows, P positions of a row, T loss tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treadle.policy.backends.loss_batch import LossBatch, MicroBatchTokens
from treadle.policy.backends.ranks import to_device
from treadle.policy.backends.vision.rows import ImagePacker, ImageRows
from treadle.policy.client.batch import balance, input_length, pack
from treadle.policy.client.types import LOGPROB_FIELDS, TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch(MicroBatchTokens):
    """The input of one forward pass on one rank.

    Attributes:
        lengths: Packed sequences' lengths, the longest first, and 1 of each position that fills
            them up; none where each row is one sequence.
        images: Which positions are images; None where none is.
        positions_31P: In time, height and width; None where they are those of text.
        predictors_T: The position that predicts each loss token, counted over all rows.
        is_blank: Whether it only lets this rank take part in the others' communication.
    """

    ids_BP: Tensor
    lengths: Sequence[int]
    predictors_T: Tensor
    targets_T: Tensor
    is_blank: bool = False
    images: ImageRows | None = None
    positions_31P: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Positions that the model computes."""
        return 0 if self.is_blank else self.ids_BP.numel()


class Batch(LossBatch):
    """Builds the micro-batches of one batch."""

    def __init__(
        self,
        sequences: Sequence[TrainSequence],
        weights: Sequence[float],
        *,
        at: torch.device,
        packs: bool,
        multiple: int = 1,
        images: ImagePacker | None = None,
    ) -> None:
        """Takes the whole batch; see `LossBatch`.

        Args:
            packs: Whether sequences are end to end in one row.
            multiple: Number of which the positions of such a row are a multiple; it is filled up.
            images: Finds the images of a model that sees; None: it reads text only.

        Raises:
            ValueError: Some sequences have images, and the model reads text only.
        """
        if images is None and any(sequence.images for sequence in sequences):
            raise ValueError("sequences have images, and the model has no vision tower")
        super().__init__(sequences, weights, at=at)
        self._packs, self._multiple, self._images = packs, multiple, images
        if images is not None:
            images.start_batch()

    def parts(
        self, computed: Sequence[int], *, max_tokens: int, num_shards: int, shard: int
    ) -> list[list[int]]:
        """Returns the sequences of each micro-batch of a shard; may be empty.

        Args:
            computed: Indices of those that go through the model.
            max_tokens: Most positions of a micro-batch of several sequences.
        """
        if self.sequences and self.sequences[0].shard is not None:  # the driver has chosen
            mine = [i for i in computed if self.sequences[i].shard == shard]
        else:
            lengths = [input_length(self.sequences[i]) for i in computed]
            mine = [computed[i] for i in balance(lengths, num_shards)[shard]]
        lengths = [input_length(self.sequences[i]) for i in mine]
        packs = pack(lengths, max_tokens=max_tokens) if self._packs else _rows(lengths, max_tokens)
        return [[mine[member] for member in reversed(members)] for members in packs]

    def micro_batch(self, indices: Sequence[int], *, is_blank: bool = False) -> MicroBatch:
        """Returns the input for some sequences, the longest of which is the first."""
        loss_tokens: dict[str, Any] = self.loss_tokens(indices)
        chosen = [self.sequences[i] for i in indices]
        lengths = [input_length(sequence) for sequence in chosen]
        parts = [np.asarray(s.ids)[:n] for s, n in zip(chosen, lengths, strict=True)]
        if self._packs:
            ids = np.concatenate(parts)[None]
            ids = np.pad(ids, ((0, 0), (0, -ids.shape[1] % self._multiple)))
            starts = [0, *accumulate(lengths[:-1])]
        else:
            ids = np.zeros((len(parts), lengths[0]), dtype=np.int64)
            for row, part in zip(ids, parts, strict=True):
                row[: len(part)] = part
            starts = [lengths[0] * row for row in range(len(parts))]
        places = [self._positions[i] for i in indices]
        before = [start + place - 1 for start, place in zip(starts, places, strict=True)]
        targets = [np.asarray(s.ids)[where] for s, where in zip(chosen, places, strict=True)]
        if self._images is not None and any(sequence.images for sequence in chosen):
            own = [range(length) for length in lengths]
            loss_tokens["images"] = self._images.rows(chosen, own, None, self._at)
            positions = np.concatenate([self._images.positions(s) for s in chosen], 1)
            positions = np.pad(positions, ((0, 0), (0, ids.shape[1] - positions.shape[1])))
            loss_tokens["positions_31P"] = torch.from_numpy(positions)[:, None].to(self._at)
        return MicroBatch(
            ids_BP=to_device(ids.astype(np.int64), self._at),
            lengths=[*lengths, *[1] * (ids.shape[1] - sum(lengths))] if self._packs else (),
            predictors_T=self._joined(before, np.int64),
            targets_T=self._joined(targets, np.int64),
            is_blank=is_blank,
            **loss_tokens,
        )

    def prefetch(self, indices: Sequence[int]) -> None:
        """Starts to decode the images of a later micro-batch."""
        if self._images is not None:
            self._images.prefetch([self.sequences[i] for i in indices])

    def blank(self) -> MicroBatch:
        """Returns a micro-batch of a sequence that is not in the batch, with its fields."""
        floats: dict[str, Any] = {name: (0.0, 0.0) for name in LOGPROB_FIELDS if self.has(name)}
        sequence = TrainSequence(
            ids=(0, 0),
            loss_mask=(False, True),
            advantages=0.0,
            selected=(False, False) if self.has("selected") else None,
            **floats,
        )
        batch = Batch([sequence], [0.0], at=self._at, packs=self._packs, multiple=self._multiple)
        return batch.micro_batch([0], is_blank=True)


def _rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Puts indices into micro-batches of rows of one length, each in ascending length.

    Neighbours in length share a micro-batch, so that little of it is padding.
    """
    found: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not found or lengths[found[-1][0]] * (len(found[-1]) + 1) > max_tokens:
            found.append([])
        found[-1].append(index)
    return [members[::-1] for members in found]
