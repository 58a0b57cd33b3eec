"""Image inputs: from the files of a prompt to what a vision tower reads.

For engines whose model runs in other processes: they pass on patches and places, and never the
prompt's text. The prompt keeps exactly its ids.

Shapes: an image has P patches of D values, and P / merge_size^2 placeholder ids.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from treadle.rollout_server.engine import EngineRequest
from treadle.rollout_server.engines.images.patches import PatchCutter, check_patch_sizes
from treadle.rollout_server.engines.images.reader import ImageDecoder, PlacedImage

_CONFIGS: Any = AutoConfig  # Untyped in transformers.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageInput:
    """An image of a prompt, as a vision tower reads it.

    Attributes:
        placed: The image and its place in the prompt.
        patches: ``[P, D]``, in the model's element type.
        grid_thw: Number of frames, and of rows and columns of patches.
    """

    placed: PlacedImage
    patches: torch.Tensor
    grid_thw: tuple[int, int, int]


class ImageInputs:
    """Reads the images of prompts for one model. Used from a single event loop.

    Args:
        directory: Model directory with an image processor; its model `takes_images`.
        dtype: Element type of the patches.
        cache_bytes: Maximum memory for decoded images.

    Raises:
        OSError: The directory has no image processor.
        ValueError: The image processor is not of the Qwen2-VL family, or does not fit the model.
    """

    def __init__(self, directory: Path, *, dtype: torch.dtype, cache_bytes: int) -> None:
        self.config: Any = _CONFIGS.from_pretrained(directory, local_files_only=True)
        self._reader = ImageDecoder(
            directory, placeholder_id=self.config.image_token_id, cache_bytes=cache_bytes
        )
        processor = self._reader.processor
        check_patch_sizes(processor, self.config.vision_config)
        self.merge_size: int = processor.merge_size
        self._dtype = dtype
        self._patches = PatchCutter(processor, torch.device("cpu"))

    @property
    def max_ids(self) -> int:
        """Maximum number of placeholder ids of an image."""
        processor = self._reader.processor
        side = int(processor.patch_size) * int(processor.merge_size)
        return max(1, int(processor.size["longest_edge"]) // side**2)

    @property
    def patch_values(self) -> int:
        """Number of values of a patch, D."""
        processor = self._reader.processor
        return 3 * int(processor.temporal_patch_size) * int(processor.patch_size) ** 2

    async def read(self, request: EngineRequest) -> tuple[ImageInput, ...]:
        """Decodes and cuts the images of a request; none once this is closed.

        Raises:
            ImageUnreadable: An image cannot be decoded, or is too large.
            PlaceholderMismatch: The number of placeholders of an image is wrong.
            InvalidField: An id in the place of an image is not the placeholder.
        """
        placed = await self._reader.read(request.images, request.prompt)
        # Takes milliseconds for each megapixel.
        return await asyncio.to_thread(lambda: tuple(map(self._input, placed)))

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self._reader.close()

    def _input(self, placed: PlacedImage) -> ImageInput:
        rows, columns = placed.grid
        return ImageInput(
            placed=placed,
            patches=self._patches.cut(placed.image.pixels).to(self._dtype),
            grid_thw=(1, rows * self.merge_size, columns * self.merge_size),
        )
