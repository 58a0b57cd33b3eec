"""Makes patches of the bytes of images, beside the step.

Invariant: the patches are those of the model's own image processor in transformers, for the image
turned upright as its EXIF header says; the rollout engines do the same. An image is known by its
bytes: it is decoded once, for all sequences and passes of a batch, as long as the cache holds it.

Who waits: `patches` waits for the thread that decodes the image; `prefetch` starts it.

Shape suffixes: P patches of an image, D values of a patch.
"""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import PIL.Image
from torch import Tensor

from treadle.agent_loop import SetupError

if TYPE_CHECKING:
    from treadle.agent_loop import Image, PlacedImage
    from treadle.policy.backends.vision.positions import Grid
    from treadle.policy.backends.vision.shape import VisionShape

_FORMATS: Final = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP"}
_ORIENTATION: Final = 0x0112  # EXIF
_UPRIGHT: Final = {  # EXIF orientation -> the transpose that undoes it.
    2: PIL.Image.Transpose.FLIP_LEFT_RIGHT,
    3: PIL.Image.Transpose.ROTATE_180,
    4: PIL.Image.Transpose.FLIP_TOP_BOTTOM,
    5: PIL.Image.Transpose.TRANSPOSE,
    6: PIL.Image.Transpose.ROTATE_270,
    7: PIL.Image.Transpose.TRANSVERSE,
    8: PIL.Image.Transpose.ROTATE_90,
}
_ON_ITS_SIDE: Final = (5, 6, 7, 8)
_CACHE_BYTES: Final = 1 << 29
"""Maximum host memory for patches; the image being read is kept even beyond it."""
_THREADS: Final = 2
"""Decoding releases the GIL, and a rank has few cores."""


class ImageReader:
    """Reads images for one model. Used from a single thread."""

    def __init__(self, folder: Path, shape: VisionShape) -> None:
        """Loads the image processor.

        Raises:
            SetupError: There is no image processor, or it does not fit the tower.
        """
        # Here, because it takes over a second, which ranks of text models need not spend.
        from transformers import AutoImageProcessor
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
            smart_resize,
        )

        processors: Any = AutoImageProcessor  # Untyped in transformers.
        try:
            self._processor: Any = processors.from_pretrained(
                folder, local_files_only=True, backend="pil"
            )
        except (OSError, ValueError, json.JSONDecodeError) as error:
            raise SetupError(
                f"{folder} has no image processor that loads ({error}): copy the model's "
                "preprocessor_config.json there"
            ) from error
        if not isinstance(self._processor, Qwen2VLImageProcessorPil):
            raise SetupError(
                f"{folder} has the image processor {type(self._processor).__name__}; only those of "
                "Qwen2.5-VL and Qwen3-VL are supported"
            )
        processor = self._processor
        theirs = (processor.patch_size, processor.temporal_patch_size, processor.merge_size)
        ours = (shape.patch, shape.frames, shape.merge)
        if ours != theirs:
            raise SetupError(
                f"{folder}: the vision tower has patch, temporal patch and merge sizes {ours} and "
                f"the image processor {theirs}: copy both from one model"
            )
        self._smart_resize = smart_resize
        self._stride = shape.patch * shape.merge
        self._grids: dict[Image, Grid] = {}
        self._cached: OrderedDict[Image, Future[Tensor]] = OrderedDict()  # oldest first
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="policy-images")

    def start_batch(self) -> None:
        """Forgets the sizes of the images of the last batch."""
        self._grids.clear()

    def grid(self, placed: PlacedImage) -> Grid:
        """Returns the rows and columns of an image's embeddings; decodes no pixel.

        Raises:
            ValueError: Its file cannot be read, or it has another number of placeholder ids.
        """
        grid = self._grids.get(placed.image)
        if grid is None:
            grid = self._grids[placed.image] = self._read_grid(placed.image)
        if grid[0] * grid[1] != placed.num_tokens:
            raise ValueError(
                f"an image at {placed.start} has {placed.num_tokens} placeholder ids, and by the "
                f"image processor in the model's folder {grid[0]} x {grid[1]}: the rollout used "
                "another image processor"
            )
        return grid

    def prefetch(self, images: Iterable[Image]) -> None:
        """Starts to decode images that are not cached."""
        for image in images:
            if image not in self._cached:
                self._cached[image] = self._threads.submit(self._read, image)

    def patches(self, image: Image) -> Tensor:
        """Returns the [P, D] normalised patches of an image, float32, on the host.

        Raises:
            ValueError: It cannot be decoded.
        """
        self.prefetch([image])
        patches_PD = self._cached[image].result()
        self._cached.move_to_end(image)
        size = sum(f.result().nbytes for f in self._cached.values() if f.done())
        while size > _CACHE_BYTES and len(self._cached) > 1:
            oldest, future = next(iter(self._cached.items()))
            if oldest is image or not future.done():
                break
            size -= self._cached.pop(oldest).result().nbytes
        return patches_PD

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read_grid(self, image: Image) -> Grid:
        with _opened(image) as opened:
            width, height = opened.size
            if _orientation(opened) in _ON_ITS_SIDE:
                width, height = height, width
        size = self._processor.size
        height, width = self._smart_resize(
            height,
            width,
            factor=self._stride,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
        )
        return height // self._stride, width // self._stride

    def _read(self, image: Image) -> Tensor:
        with _opened(image) as opened:
            turn = _UPRIGHT.get(_orientation(opened))
            upright = opened if turn is None else opened.transpose(turn)
            upright.load()
            found: Tensor = self._processor(
                images=[upright], do_convert_rgb=True, return_tensors="pt"
            ).pixel_values
        return found


def _opened(image: Image) -> PIL.Image.Image:
    try:
        opened: PIL.Image.Image = PIL.Image.open(
            io.BytesIO(image.data), formats=[_FORMATS[image.mime]]
        )
    except PIL.UnidentifiedImageError as error:
        raise ValueError(f"an image of {len(image.data)} bytes is not {image.mime}") from error
    return opened


def _orientation(opened: PIL.Image.Image) -> Any:
    # Only from the header, which the renderer reads too.
    return opened.getexif().get(_ORIENTATION) if "exif" in opened.info else None
