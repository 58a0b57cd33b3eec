"""Vision: what a step of the model needs beyond ids when sequences hold images.

Invariant: an id at an image's place is read as the vector that the vision tower makes of
that part of the image, and stands at that part's row and column; every other id, the
placeholder among them where no image was sent, is read and placed as text. So a placeholder
that the model sampled itself does no harm.

Positions are those of multimodal rotary embedding (Wang et al. 2024, arXiv 2409.12191, 2.1):
text advances time, height and width together; an image stands still in time and takes its
rows and columns; what follows goes on after the larger of the two.

Everything here runs on the compute thread; nothing waits.

Shapes: T tokens of a step, an image of H times W pixels, P patches of D values and N ids, C
hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from treadle.rollout_server.engines.torch.images import PlacedImage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImagePositions:
    """Where the ids of a sequence with images stand.

    Attributes:
        prompt: ``[3, prompt length]``: time, height, width.
        offset: Of each id after the prompt: its position is its index plus this, in all three.
    """

    prompt: torch.Tensor
    offset: int

    @classmethod
    def of(cls, images: Sequence[PlacedImage], num_prompt_ids: int) -> "ImagePositions":
        """Lays out a prompt."""
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
        """Positions of ids ``[start, stop)``, all of the prompt or none of it, ``[3, n]``."""
        if start < self.prompt.shape[1]:
            return self.prompt[:, start:stop]
        return torch.arange(start + self.offset, stop + self.offset).expand(3, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """What a step sees.

    Attributes:
        positions: ``[3, T]``.
        vectors: ``[n, C]`` each, with the index of the first of the step's ids that they replace.
    """

    positions: torch.Tensor
    vectors: Sequence[tuple[int, torch.Tensor]]


class VisionTower:
    """The part of a model that turns patches into vectors.

    Args:
        tower: transformers' module.
        processor: The model's image processor, which says how patches are normalised.
        device: Where it computes.

    Raises:
        ValueError: Processor and tower cut images in different ways.
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
                f"processor {theirs}: copy both of the same model"
            )
        self._patch, self._frames, self._merge = ours
        shift, scale = (torch.zeros(3), torch.ones(3))
        if processor.do_normalize:
            shift, scale = (torch.tensor(x) for x in (processor.image_mean, processor.image_std))
        factor = processor.rescale_factor if processor.do_rescale else 1.0
        self._factor = (factor / scale).to(device)[:, None, None]
        self._shift = (shift / scale).to(device)[:, None, None]

    def see(self, placed: PlacedImage) -> torch.Tensor:
        """The vectors of an image, ``[N, C]``."""
        pixels_3HW = placed.picture.pixels.to(self._device).float()
        patches_PD = self._cut(pixels_3HW * self._factor - self._shift).to(self._tower.dtype)
        rows, columns = placed.grid
        grid = torch.tensor([[1, rows * self._merge, columns * self._merge]], device=self._device)
        vectors: torch.Tensor = self._tower(patches_PD, grid_thw=grid).pooler_output
        return vectors

    def _cut(self, pixels_3HW: torch.Tensor) -> torch.Tensor:
        """Cuts patches, ``[P, D]``: those that become one vector follow one another.

        A still image is a film of equal frames.
        """
        _, height, width = pixels_3HW.shape
        patch, merge, stride = self._patch, self._merge, self._patch * self._merge
        grid = pixels_3HW.view(3, height // stride, merge, patch, width // stride, merge, patch)
        patches = grid.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, 1, patch, patch)
        return patches.expand(-1, -1, self._frames, -1, -1).flatten(1)
