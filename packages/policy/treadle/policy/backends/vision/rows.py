"""Which rows of a micro-batch are images, and the patches that the tower computes them from.

Invariant: the sequence's list of images decides which rows are images, not the placeholder id: a
placeholder that the model samples is text. Each distinct image of a micro-batch goes through the
tower once, however many sequences show it.

It travels with the micro-batch, as the field `images` of its `Segments`.

Shape suffixes: P packed rows, K rows that are images, N distinct images, X patches of all of them,
D values of a patch, L tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.policy.backends.vision.positions import positions_of
from treadle.policy.client.batch import input_length

if TYPE_CHECKING:
    from treadle.agent_loop import Image, PlacedImage
    from treadle.policy.backends.vision.reader import ImageReader
    from treadle.policy.backends.vision.shape import VisionShape
    from treadle.policy.client.types import TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRows:
    """The images of one micro-batch.

    Attributes:
        patches_XD: Normalised patches, image after image.
        grids_N3: Number of images in time, always 1, and rows and columns of patches of each image.
        rows_K: The packed rows that are images.
        index_K: Which embedding of the tower each of them is.
        deepstack: The tower's output for the first layers, [all embeddings, H] each; empty before
            it has computed.
    """

    patches_XD: Tensor
    grids_N3: Tensor
    rows_K: Tensor
    index_K: Tensor
    deepstack: tuple[Tensor, ...] = ()

    def of_rows(self, first: int, count: int) -> ImageRows:
        """Returns those of a block of packed rows, numbered from its first."""
        inside_K = (self.rows_K >= first) & (self.rows_K < first + count)
        return replace(self, rows_K=self.rows_K[inside_K] - first, index_K=self.index_K[inside_K])


def computed_images(sequence: TrainSequence) -> list[PlacedImage]:
    """Returns the images among the tokens that go through the model."""
    length = input_length(sequence)
    return [placed for placed in sequence.images if placed.start < length]


class ImagePacker:
    """Finds the images of micro-batches, on one rank."""

    def __init__(self, reader: ImageReader, shape: VisionShape, *, has_tower: bool) -> None:
        """Takes what all batches share.

        Args:
            has_tower: Whether this rank is of the first stage; the others need positions only.
        """
        self._reader, self._shape, self._has_tower = reader, shape, has_tower

    def start_batch(self) -> None:
        """Forgets what is known of the images of the last batch, but for decoded ones."""
        self._reader.start_batch()

    def positions(self, sequence: TrainSequence) -> NDArray[np.int64]:
        """Returns the [3, L] positions of the tokens that go through the model.

        Raises:
            ValueError: The sequence does not fit an image.
        """
        images = [(i.start, self._reader.grid(i)) for i in computed_images(sequence)]
        return positions_of(input_length(sequence), images)

    def prefetch(self, sequences: Sequence[TrainSequence]) -> None:
        """Starts to decode the images of a later micro-batch."""
        if self._has_tower:
            self._reader.prefetch(i.image for s in sequences for i in computed_images(s))

    def rows(
        self,
        sequences: Sequence[TrainSequence],
        own: Sequence[range],
        places: Mapping[int, int] | None,
        at: torch.device,
    ) -> ImageRows | None:
        """Returns the images of a micro-batch; None if it has none, or the rank has no tower.

        Args:
            sequences: In the order in which they are packed.
            places: Row on this rank by packed row; None: all rows are on this rank.
        """
        if not self._has_tower:
            return None
        firsts: dict[Image, int] = {}  # of the embeddings of each image
        grids: list[tuple[int, int, int]] = []
        rows: list[int] = []
        index: list[int] = []
        total = begin = 0
        for sequence, tokens in zip(sequences, own, strict=True):
            for placed in computed_images(sequence):
                inside = range(max(placed.start, tokens.start), min(placed.stop, tokens.stop))
                if not inside:
                    continue
                if placed.image not in firsts:
                    height, width = self._reader.grid(placed)
                    merge = self._shape.merge
                    grids.append((1, height * merge, width * merge))
                    firsts[placed.image] = total
                    total += placed.num_tokens
                first = firsts[placed.image] - placed.start
                rows += [begin + t - tokens.start for t in inside]
                index += [first + t for t in inside]
            begin += len(tokens)
        if places is not None:
            kept = [(places[r], i) for r, i in zip(rows, index, strict=True) if r in places]
            rows, index = [r for r, _ in kept], [i for _, i in kept]
        if not firsts:
            return None
        patches = [self._reader.patches(image) for image in firsts]
        return ImageRows(
            patches_XD=torch.cat(patches).to(at, non_blocking=True),
            grids_N3=torch.tensor(grids).to(at, non_blocking=True),
            rows_K=torch.tensor(rows, dtype=torch.int64).to(at, non_blocking=True),
            index_K=torch.tensor(index, dtype=torch.int64).to(at, non_blocking=True),
        )
