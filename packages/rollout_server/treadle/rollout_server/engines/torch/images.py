"""Images: decoded, resized and cut into patches, on a thread of their own.

Invariant: an image is what its bytes are. Each distinct one has a serial number, which no
other ever has, so that two prompts share a prefix only as far as their pictures are equal
too (`prefix.py` compares serials where placeholder ids stand). What cannot be decoded, or
has not as many placeholders as the model makes of it, is refused here, before the sequence
costs anything.

Who waits: `ImageReader.read`, for the reader thread. There is one, so that eight samples of
one prompt, which come at once, decode its images once; it owns the cache of what was read,
least recently used out first. The compute thread gets patches as bytes, a twelfth of
what the vision tower wants in float32, and normalises those that no prefix holds.

Sizes: P patches of D values (3 colours, 2 equal frames, patch_size squared); an image has as
many placeholders as P / merge_size squared.
"""

import asyncio
import hashlib
import io
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers import AutoImageProcessor

from treadle.rollout_server.engine import PromptImage
from treadle.rollout_server.errors import ImagePlaceholders, ImageUnreadable, InvalidField

_FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP"}
_MAX_PIXELS = 1 << 26  # 192 MiB decoded; more is a mistake or an attack.
_PROCESSORS: Any = AutoImageProcessor  # Untyped in transformers.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImagePatches:
    """An image as the vision tower takes it, but for normalisation.

    Attributes:
        serial: Of its bytes, unique in this process.
        grid: Patches down and across.
        patches: ``[P, D]``, uint8.
    """

    serial: int
    grid: tuple[int, int]
    patches: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedPatches:
    """An image and the ids of a sequence that stand for it.

    Attributes:
        start: Index of the first id.
        grid: Ids down and across: the image's patches, merged.
        image: What was read.
    """

    start: int
    grid: tuple[int, int]
    image: ImagePatches

    @property
    def stop(self) -> int:
        """After the last id."""
        return self.start + self.grid[0] * self.grid[1]


class ImageReader:
    """Reads the images of prompts for one model.

    Args:
        directory: Of the model; holds the configuration of its image processor.
        placeholder_id: Stands for images in prompts.
        cache_bytes: Most memory for what was read.

    Raises:
        OSError: There is no image processor.
        ValueError: It is of another family than Qwen2-VL's.
    """

    def __init__(self, directory: Path, *, placeholder_id: int, cache_bytes: int) -> None:
        # The same pixels with and without torchvision, which resizes in another way.
        self.processor: Any = _PROCESSORS.from_pretrained(
            directory, local_files_only=True, backend="pil"
        )
        if not hasattr(self.processor, "merge_size"):
            raise ValueError(
                f"{directory} has the image processor {type(self.processor).__name__}; the torch "
                "engine takes those of Qwen2-VL and Qwen2.5-VL"
            )
        self._placeholder_id = placeholder_id
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._cache: OrderedDict[bytes, ImagePatches] = OrderedDict()
        self._serials = itertools.count()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch-engine-images")

    async def read(
        self, images: Sequence[PromptImage], prompt: Sequence[int]
    ) -> tuple[PlacedPatches, ...]:
        """Reads the images of a prompt.

        Raises:
            ImageUnreadable: One cannot be decoded, or is too large.
            ImagePlaceholders: One has not as many placeholders as the model makes of it.
            InvalidField: Another id than the placeholder stands at its place.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._read_all, images, prompt)

    def close(self) -> None:
        """Ends the thread after what it reads now; `read` may not be called again."""
        self._thread.shutdown(wait=False)

    def _read_all(
        self, images: Sequence[PromptImage], prompt: Sequence[int]
    ) -> tuple[PlacedPatches, ...]:
        return tuple(self._place(index, image, prompt) for index, image in enumerate(images))

    def _place(self, index: int, image: PromptImage, prompt: Sequence[int]) -> PlacedPatches:
        known = self._known(index, image)
        merge = self.processor.merge_size
        grid = (known.grid[0] // merge, known.grid[1] // merge)
        if grid[0] * grid[1] != image.num_tokens:
            raise ImagePlaceholders(index, image.start, image.num_tokens, grid[0] * grid[1])
        for place in range(image.start, image.stop):
            if prompt[place] != self._placeholder_id:
                raise InvalidField(
                    f"prompt_token_ids[{place}]",
                    prompt[place],
                    f"{self._placeholder_id}, the placeholder, in the place of images[{index}]",
                )
        return PlacedPatches(start=image.start, grid=grid, image=known)

    def _known(self, index: int, image: PromptImage) -> ImagePatches:
        key = hashlib.sha256(image.data).digest()
        known = self._cache.get(key)
        if known is not None:
            self._cache.move_to_end(key)
            return known
        try:
            known = self._decode(image)
        except Exception as error:  # Pillow raises whatever a file makes it stumble over.
            raise ImageUnreadable(index, image.media_type, str(error)) from error
        self._cache[key] = known
        self._cached_bytes += known.patches.nbytes
        while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= oldest.patches.nbytes
        return known

    def _decode(self, image: PromptImage) -> ImagePatches:
        """Reads, turns upright, resizes and cuts; the numbers stay bytes."""
        opened = Image.open(io.BytesIO(image.data), formats=[_FORMATS[image.media_type]])
        if opened.width * opened.height > _MAX_PIXELS:
            raise ValueError(
                f"it has {opened.width}x{opened.height} pixels, at most {_MAX_PIXELS} are taken"
            )
        # The client looks in the header only, and has to come to the same size.
        upright = ImageOps.exif_transpose(opened) if "exif" in opened.info else opened
        features = self.processor(images=[upright], do_rescale=False, do_normalize=False)
        _, height, width = features["image_grid_thw"][0]
        patches = np.asarray(features["pixel_values"], dtype=np.uint8)
        return ImagePatches(
            serial=next(self._serials),
            grid=(int(height), int(width)),
            patches=torch.from_numpy(patches),
        )
