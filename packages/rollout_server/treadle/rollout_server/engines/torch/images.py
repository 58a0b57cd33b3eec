"""Images: decoded and resized, on threads of their own.

Invariant: an image is what its bytes are. Each distinct one has a serial number, which no
other ever has, so that two prompts share a prefix only as far as their pictures are equal
too (`prefix.py` compares serials where placeholder ids stand). What cannot be decoded, or
has not as many placeholders as the model makes of it, is refused here, before the sequence
costs anything.

Who waits: `ImageReader.read`, for one of the reader's threads; and a thread that finds an
image being read, for the thread that reads it: eight samples of one prompt, which come at
once, decode its images once. What was read is kept, least recently used out first. The
compute thread gets pixels, and cuts and normalises those that no prefix holds.

Sizes: an image of H times W pixels after resizing has as many placeholders as patches of
patch_size squared / merge_size squared.
"""

import asyncio
import hashlib
import io
import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from treadle.rollout_server.engine import PromptImage
from treadle.rollout_server.errors import ImagePlaceholders, ImageUnreadable, InvalidField

_FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP"}
_CONFIGURATIONS = ("preprocessor_config.json", "processor_config.json")
_MAX_PIXELS = 1 << 26  # 192 MiB decoded; more is a mistake or an attack.
_THREADS = 4  # Decoding and resizing run outside of the interpreter's lock.
_PROCESSORS: Any = AutoImageProcessor  # Untyped in transformers.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picture:
    """An image as the vision tower cuts it.

    Attributes:
        serial: Of its bytes, unique in this process.
        pixels: ``[3, H, W]``, uint8; red, green, blue.
    """

    serial: int
    pixels: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedImage:
    """An image and the ids of a sequence that stand for it.

    Attributes:
        start: Index of the first id.
        grid: Ids down and across.
        picture: What was read.
    """

    start: int
    grid: tuple[int, int]
    picture: Picture

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
        if not any((directory / name).is_file() for name in _CONFIGURATIONS):
            raise FileNotFoundError(
                f"{directory} holds no {_CONFIGURATIONS[0]}: copy the model's image processor there"
            )
        # The same pixels with and without torchvision, which resizes in another way.
        self.processor: Any = _PROCESSORS.from_pretrained(
            directory, local_files_only=True, backend="pil"
        )
        if not isinstance(self.processor, Qwen2VLImageProcessorPil):
            raise ValueError(
                f"{directory} has the image processor {type(self.processor).__name__}; the torch "
                "engine takes those of Qwen2-VL and Qwen2.5-VL"
            )
        self._placeholder_id = placeholder_id
        self._stride = self.processor.patch_size * self.processor.merge_size
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._cache: OrderedDict[bytes, Future[Picture]] = OrderedDict()  # Oldest use first.
        self._lock = threading.Lock()
        self._serials = itertools.count()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="torch-engine-images")

    async def read(
        self, images: Sequence[PromptImage], prompt: Sequence[int]
    ) -> tuple[PlacedImage, ...]:
        """Reads the images of a prompt.

        Raises:
            ImageUnreadable: One cannot be decoded, or is too large.
            ImagePlaceholders: One has not as many placeholders as the model makes of it.
            InvalidField: Another id than the placeholder stands at its place.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._read_all, images, prompt)

    def close(self) -> None:
        """Ends the threads after what they read now; `read` may not be called again."""
        self._threads.shutdown(wait=False)

    def _read_all(
        self, images: Sequence[PromptImage], prompt: Sequence[int]
    ) -> tuple[PlacedImage, ...]:
        return tuple(self._place(index, image, prompt) for index, image in enumerate(images))

    def _place(self, index: int, image: PromptImage, prompt: Sequence[int]) -> PlacedImage:
        try:
            picture = self._picture(image)
        except Exception as error:  # Pillow raises whatever a file makes it stumble over.
            raise ImageUnreadable(index, image.media_type, str(error)) from error
        _, height, width = picture.pixels.shape
        grid = (height // self._stride, width // self._stride)
        if grid[0] * grid[1] != image.num_tokens:
            raise ImagePlaceholders(index, image.start, image.num_tokens, grid[0] * grid[1])
        for place in range(image.start, image.stop):
            if prompt[place] != self._placeholder_id:
                raise InvalidField(
                    f"prompt_token_ids[{place}]",
                    prompt[place],
                    f"{self._placeholder_id}, the placeholder, in the place of images[{index}]",
                )
        return PlacedImage(start=image.start, grid=grid, picture=picture)

    def _picture(self, image: PromptImage) -> Picture:
        """What was read of these bytes before, by any thread; else reads them."""
        key = hashlib.sha256(image.data).digest()
        with self._lock:
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
            else:
                reading = self._cache[key] = Future[Picture]()
        if known is not None:
            return known.result()
        try:
            picture = Picture(serial=next(self._serials), pixels=self._decode(image))
        except BaseException as error:
            with self._lock:
                del self._cache[key]
            reading.set_exception(error)
            raise
        reading.set_result(picture)
        self._make_room(picture.pixels.nbytes)
        return picture

    def _make_room(self, num_bytes: int) -> None:
        """Counts a picture; those used longest ago go, but for the newest one."""
        with self._lock:
            self._cached_bytes += num_bytes
            done = [key for key, future in self._cache.items() if future.done()]
            for key in done[:-1]:
                if self._cached_bytes <= self._cache_bytes:
                    break
                self._cached_bytes -= self._cache.pop(key).result().pixels.nbytes

    def _decode(self, image: PromptImage) -> torch.Tensor:
        """Reads, turns upright and resizes."""
        opened = Image.open(io.BytesIO(image.data), formats=[_FORMATS[image.media_type]])
        if opened.width * opened.height > _MAX_PIXELS:
            raise ValueError(
                f"it has {opened.width}x{opened.height} pixels, at most {_MAX_PIXELS} are taken"
            )
        # The client looks in the header only, and has to come to the same size.
        upright = ImageOps.exif_transpose(opened) if "exif" in opened.info else opened
        processor = self.processor
        # Colours as transformers makes them, which puts what is transparent on white.
        pixels_3HW = processor.process_image(upright, do_convert_rgb=True)
        colours = Image.fromarray(np.ascontiguousarray(np.moveaxis(pixels_3HW, 0, -1)))
        size = processor.size
        height, width = smart_resize(
            colours.height,
            colours.width,
            factor=self._stride,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
        )
        resized = colours.resize((width, height), processor.resample)
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1)
