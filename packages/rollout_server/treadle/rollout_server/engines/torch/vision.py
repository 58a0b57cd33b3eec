"""Vision inputs of a step: positions and image embeddings of sequences with images.

Invariant: a placeholder id of an image is replaced by the embedding of its part of the image,
at the position of that row and column. Every other id is text, including a placeholder where
no image was sent, so a placeholder that the model samples is harmless.

Everything here runs on the compute thread; nothing waits.

Shapes: T tokens of a step; an image of P patches of D values and N ids; C hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from treadle.rollout_server.engines.images.patches import PatchCutter, check_patch_sizes
from treadle.rollout_server.engines.images.reader import PlacedImage


@dataclass(frozen=True, slots=True, eq=False)
class VisionInputs:
    """Model inputs of a step in which a sequence has images.

    Attributes:
        positions: Array of shape ``[3, T]``, by axis.
        embeddings: For each image, the index of the first id of the step that it replaces, and
            its embeddings ``[n, C]``.
    """

    positions: torch.Tensor
    embeddings: Sequence[tuple[int, torch.Tensor]]


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
