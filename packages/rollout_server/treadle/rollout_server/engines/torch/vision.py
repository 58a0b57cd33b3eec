"""Vision inputs of a step: positions and image embeddings of sequences with images.

Invariant: a placeholder id of an image is replaced by the embedding of its part of the image,
at the position of that row and column. Every other id is text, including a placeholder where
no image was sent, so a placeholder that the model samples is harmless.

Positions follow multimodal rotary embedding (Wang et al. 2024, arXiv 2409.12191, 2.1): text
advances time, height and width together. An image has one time and its own rows and columns,
and the text after it continues from the larger of the two.

Everything here runs on the compute thread; nothing waits.

Shapes: T tokens of a step; an image of H times W pixels, P patches of D values and N ids; C
hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from treadle.rollout_server.engines.torch.images import PlacedImage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImagePositions:
    """Rotary positions of the ids of a sequence with images.

    Attributes:
        prompt: ``[3, prompt length]``: time, height, width.
        offset: Added to the index of an id after the prompt; its position in all three.
    """

    prompt: torch.Tensor
    offset: int

    @classmethod
    def of(cls, images: Sequence[PlacedImage], num_prompt_ids: int) -> "ImagePositions":
        """Computes the positions of a prompt."""
        positions = torch.arange(num_prompt_ids).repeat(3, 1)
        offset = done = 0
        for placed in images:
            positions[:, done : placed.start] += offset
            rows, columns = placed.grid
            begin = placed.start + offset
            inside = positions[:, placed.start : placed.stop]
            inside[0] = begin
            inside[1] = begin + torch.arange(rows).repeat_interleave(columns)
            inside[2] = begin + torch.arange(columns).repeat(rows)
            done = placed.stop
            offset = begin + max(rows, columns) - done
        positions[:, done:] += offset
        return cls(prompt=positions, offset=offset)

    def within(self, start: int, stop: int) -> torch.Tensor:
        """Returns positions ``[3, n]`` of ids ``[start, stop)``, all or none in the prompt."""
        if start < self.prompt.shape[1]:
            return self.prompt[:, start:stop]
        return torch.arange(start + self.offset, stop + self.offset).expand(3, -1)


@dataclass(frozen=True, slots=True, eq=False)
class VisionInputs:
    """Model inputs of a step in which a sequence has images.

    Attributes:
        positions: ``[3, T]``.
        embeddings: For each image, the index of the first id of the step that it replaces, and
            its embeddings ``[n, C]``.
    """

    positions: torch.Tensor
    embeddings: Sequence[tuple[int, torch.Tensor]]


class VisionTower:
    """The part of a model that turns image patches into embeddings.

    Args:
        tower: The module of transformers.
        processor: The model's image processor, which defines how patches are normalised.
        device: Device on which the tower runs.

    Raises:
        ValueError: Image processor and vision tower use different patch sizes.
    """

    def __init__(self, tower: Any, processor: Any, device: torch.device) -> None:
        self._tower = tower
        self._device = device
        config = tower.config
        ours = (config.patch_size, config.temporal_patch_size, config.spatial_merge_size)
        theirs = (processor.patch_size, processor.temporal_patch_size, processor.merge_size)
        if ours != theirs:
            raise ValueError(
                f"the vision tower has patch, temporal patch and merge sizes {ours} and the image "
                f"processor {theirs}: copy both from the same model"
            )
        self._patch, self._frames, self._merge = ours
        shift, scale = (torch.zeros(3), torch.ones(3))
        if processor.do_normalize:
            shift, scale = (torch.tensor(x) for x in (processor.image_mean, processor.image_std))
        factor = processor.rescale_factor if processor.do_rescale else 1.0
        self._factor = (factor / scale).to(device)[:, None, None]
        self._shift = (shift / scale).to(device)[:, None, None]

    def encode_image(self, placed: PlacedImage) -> torch.Tensor:
        """Returns the embeddings of an image, ``[N, C]``."""
        pixels_3HW = placed.image.pixels.to(self._device).float()
        patches_PD = self._cut(pixels_3HW * self._factor - self._shift).to(self._tower.dtype)
        rows, columns = placed.grid
        grid = torch.tensor([[1, rows * self._merge, columns * self._merge]], device=self._device)
        embeddings: torch.Tensor = self._tower(patches_PD, grid_thw=grid).pooler_output
        return embeddings

    def _cut(self, pixels_3HW: torch.Tensor) -> torch.Tensor:
        """Cuts patches ``[P, D]``; patches that are merged into one embedding are adjacent.

        A still image is a video of equal frames.
        """
        _, height, width = pixels_3HW.shape
        patch, merge, stride = self._patch, self._merge, self._patch * self._merge
        grid = pixels_3HW.view(3, height // stride, merge, patch, width // stride, merge, patch)
        patches = grid.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, 1, patch, patch)
        return patches.expand(-1, -1, self._frames, -1, -1).flatten(1)
