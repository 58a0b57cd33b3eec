"""Patches: pixels as the vision towers of the Qwen2-VL family read them.

Invariant: the values are those of transformers' image processor for the same pixels.

Shapes: an image of H times W pixels, cut into P patches of D values.
"""

from typing import Any

import torch


def check_patch_sizes(processor: Any, tower_config: Any) -> None:
    """Checks that an image processor cuts images as a vision tower reads them.

    Raises:
        ValueError: They use different patch sizes.
    """
    names = ("patch_size", "temporal_patch_size", "spatial_merge_size")
    theirs = tuple(getattr(tower_config, name) for name in names)
    ours = (processor.patch_size, processor.temporal_patch_size, processor.merge_size)
    if theirs != ours:
        raise ValueError(
            f"the vision tower has patch, temporal patch and merge sizes {theirs} and the image "
            f"processor {ours}: copy both from the same model"
        )


class PatchCutter:
    """Normalises images and cuts them into patches.

    Args:
        device: Device on which to compute.
    """

    def __init__(self, processor: Any, device: torch.device) -> None:
        self._device = device
        self._patch: int = processor.patch_size
        self._frames: int = processor.temporal_patch_size
        self._merge: int = processor.merge_size
        shift, scale = (torch.zeros(3), torch.ones(3))
        if processor.do_normalize:
            shift, scale = (torch.tensor(x) for x in (processor.image_mean, processor.image_std))
        factor = processor.rescale_factor if processor.do_rescale else 1.0
        self._factor = (factor / scale).to(device)[:, None, None]
        self._shift = (shift / scale).to(device)[:, None, None]

    def cut(self, pixels_3HW: torch.Tensor) -> torch.Tensor:
        """Returns the patches of an image, ``[P, D]``, float32.

        Patches that are merged into one embedding are adjacent. A still image is a video of equal
        frames.
        """
        values = pixels_3HW.to(self._device).float() * self._factor - self._shift
        _, height, width = values.shape
        patch, merge, stride = self._patch, self._merge, self._patch * self._merge
        grid = values.view(3, height // stride, merge, patch, width // stride, merge, patch)
        patches = grid.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, 1, patch, patch)
        return patches.expand(-1, -1, self._frames, -1, -1).flatten(1)
