"""Vision inputs of a step: positions and image embeddings of sequences with images.

Invariant: a placeholder id of an image is replaced by the embedding of its part of the image,
at the position of that row and column. Every other id is text, including a placeholder where
no image was sent, so a placeholder that the model samples is harmless.

Everything here runs on the compute thread; nothing waits.

Shapes: T tokens of a step; an image of P patches of D values and N ids; C hidden size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from treadle.rollout_server.engines.images.patches import PatchCutter, check_patch_sizes
from treadle.rollout_server.engines.images.reader import PlacedImage
from treadle.rollout_server.engines.torch.attention import RowSpan
from treadle.rollout_server.engines.torch.sequence import Sequence

Encode = Callable[[PlacedImage], torch.Tensor]
"""Returns the embeddings of an image: `ImageEncoder.encode_image`."""


@dataclass(frozen=True, slots=True, eq=False)
class VisionInputs:
    """Model inputs of a step in which a sequence has images.

    Attributes:
        positions: Array of shape ``[3, T]``, by axis.
        embeddings: For each image, the index of the first id of the step that it replaces, and
            its embeddings ``[n, C]``.
    """

    positions: torch.Tensor
    embeddings: list[tuple[int, torch.Tensor]]


class ImageEncoder:
    """The part of a model that turns image patches into embeddings.

    Args:
        processor: The model's image processor, which defines how patches are normalised.
        device: Device on which the tower runs.

    Raises:
        ValueError: Image processor and vision tower use different patch sizes.
    """

    def __init__(self, tower: Any, processor: Any, device: torch.device) -> None:
        check_patch_sizes(processor, tower.config)
        self._tower = tower
        self._device = device
        self._patches = PatchCutter(processor, device)
        self._merge: int = processor.merge_size

    def encode_image(self, placed: PlacedImage) -> torch.Tensor:
        """Returns the embeddings of an image, ``[N, C]``."""
        patches_PD = self._patches.cut(placed.image.pixels).to(self._tower.dtype)
        rows, columns = placed.grid
        grid = torch.tensor([[1, rows * self._merge, columns * self._merge]], device=self._device)
        embeddings: torch.Tensor = self._tower(patches_PD, grid_thw=grid).pooler_output
        return embeddings


def vision_inputs(
    sequences: list[Sequence], spans: list[RowSpan], encode: Encode, device: torch.device
) -> VisionInputs:
    """Returns the positions of all ids of a step and the embeddings of its images."""
    parts: list[torch.Tensor] = []
    embeddings: list[tuple[int, torch.Tensor]] = []
    first = 0
    for sequence, span in zip(sequences, spans, strict=True):
        if sequence.positions is None:
            parts.append(torch.arange(*span).expand(3, -1))
        else:
            parts.append(sequence.positions.within(*span))
            embeddings += _embeddings(sequence, span, first, encode)
        first += span.num_tokens
    return VisionInputs(torch.cat(parts, dim=1).to(device), embeddings)


def _embeddings(
    sequence: Sequence, span: RowSpan, first: int, encode: Encode
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields the image embeddings within a span, each with its index in the step.

    The embeddings of an image that a step reads only in part are kept for the next step.
    """
    for placed in sequence.images:
        start, stop = max(placed.start, span.start), min(placed.stop, span.stop)
        if start >= stop:
            continue
        embeddings = sequence.image_embeddings.pop(placed.start, None)
        if embeddings is None:
            embeddings = encode(placed)
        if stop < placed.stop:
            sequence.image_embeddings[placed.start] = embeddings
        part = embeddings[start - placed.start : stop - placed.start]
        yield first + start - span.start, part
