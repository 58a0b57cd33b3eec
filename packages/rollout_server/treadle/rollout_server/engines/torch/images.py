"""Images: decoded and resized, on threads of their own.

Invariant: an image is what its bytes are. Each distinct one has a serial number, which no
other ever has, so that two prompts share a prefix only as far as their pictures are equal
too (`prefix.py` compares serials where placeholder ids stand). What cannot be decoded, or
has not as many placeholders as the model makes of it, is refused here, before the sequence
costs anything.

Who waits: `ImageReader.read`, for the thread that hashes an image and the one that decodes it.
Whoever wants an image that is being read waits for that reading, on the event loop and not on
a thread: eight samples of one prompt, which come at once, decode its images once and leave the
other threads to other prompts. A reading that nobody waits for any more is given up, unless it
has begun. What was read is kept, least recently used out first; serial numbers are kept for
longer, so that an image that is read again shares the prefixes that it had. The compute thread
gets pixels, and cuts and normalises those that no prefix holds.

Sizes: an image of H times W pixels after resizing has as many placeholders as patches of
patch_size squared / merge_size squared.
"""

import asyncio
import hashlib
import io
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from treadle.rollout_server.engine import PromptImage
from treadle.rollout_server.errors import ImagePlaceholders, ImageUnreadable, InvalidField

_FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP"}
_CONFIGURATIONS = ("preprocessor_config.json", "processor_config.json")
_MAX_PIXELS = 1 << 26  # Pillow takes up to 16 bytes for each; more is a mistake or an attack.
_MAX_SERIALS = 1 << 16  # About 10 MiB.
_THREADS = 4  # Decoding and resizing run outside of the interpreter's lock.
_PROCESSORS: Any = AutoImageProcessor  # Untyped in transformers.
_UPRIGHT = {  # EXIF orientation -> what undoes it.
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picture:
    """An image as the vision tower cuts it.

    Attributes:
        serial: Of its bytes, no other image's.
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


class _Closed(Exception):
    """The reader was closed before a thread came to this."""


@dataclass(slots=True, eq=False)
class _Reading:
    """An image that is being read, and how many prompts wait for it."""

    picture: asyncio.Future[Picture]
    num_waiting: int = 0


class ImageReader:
    """Reads the images of prompts for one model. One event loop calls it.

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
        self._kept_bytes = 0
        self._kept: OrderedDict[bytes, Picture] = OrderedDict()  # Oldest use first.
        self._readings: dict[bytes, _Reading] = {}
        self._numbers = itertools.count()
        self._serials: OrderedDict[bytes, int] = OrderedDict()  # Oldest use first.
        self._closed = False
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="torch-engine-images")

    async def read(
        self, images: Sequence[PromptImage], prompt: Sequence[int]
    ) -> tuple[PlacedImage, ...]:
        """Reads the images of a prompt, one after the other; none once the reader is closed.

        Raises:
            ImageUnreadable: One cannot be decoded, or is too large.
            ImagePlaceholders: One has not as many placeholders as the model makes of it.
            InvalidField: Another id than the placeholder stands at its place.
        """
        for index, image in enumerate(images):
            self._check_ids(index, image, prompt)
        placed = []
        for index, image in enumerate(images):
            try:
                picture = await self._picture(image)
            except _Closed:
                return ()
            except Exception as error:  # Pillow raises whatever a file makes it stumble over.
                raise ImageUnreadable(index, image.media_type, str(error)) from error
            placed.append(self._place(index, image, picture))
        return tuple(placed)

    def close(self) -> None:
        """Ends the threads after the images that they decode now. Idempotent."""
        self._closed = True
        self._threads.shutdown(wait=False)

    def _check_ids(self, index: int, image: PromptImage, prompt: Sequence[int]) -> None:
        ids = tuple(prompt[image.start : image.stop])
        if ids != (self._placeholder_id,) * image.num_tokens:
            wrong = next(i for i, token in enumerate(ids) if token != self._placeholder_id)
            raise InvalidField(
                f"prompt_token_ids[{image.start + wrong}]",
                ids[wrong],
                f"{self._placeholder_id}, the placeholder, in the place of images[{index}]",
            )

    def _place(self, index: int, image: PromptImage, picture: Picture) -> PlacedImage:
        _, height, width = picture.pixels.shape
        grid = (height // self._stride, width // self._stride)
        if grid[0] * grid[1] != image.num_tokens:
            raise ImagePlaceholders(index, image.start, image.num_tokens, grid[0] * grid[1])
        return PlacedImage(start=image.start, grid=grid, picture=picture)

    async def _picture(self, image: PromptImage) -> Picture:
        """What was read of these bytes before, for any prompt; else reads them."""
        # Not on the threads that decode: what is kept need not wait for them.
        key = await asyncio.to_thread(_digest, image.data)
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        if (reading := self._readings.get(key)) is None:
            picture = self._on_thread(partial(self._read, self._serial(key), image))
            reading = self._readings[key] = _Reading(picture)
            picture.add_done_callback(partial(self._end, key, reading))
        reading.num_waiting += 1
        try:
            return await asyncio.shield(reading.picture)
        finally:
            reading.num_waiting -= 1
            if not reading.num_waiting and reading.picture.cancel():
                del self._readings[key]

    def _serial(self, key: bytes) -> int:
        if (serial := self._serials.pop(key, None)) is None:
            serial = next(self._numbers)
        self._serials[key] = serial
        if len(self._serials) > _MAX_SERIALS:
            self._serials.popitem(last=False)
        return serial

    def _end(self, key: bytes, reading: _Reading, picture: asyncio.Future[Picture]) -> None:
        """Keeps what was read; those used longest ago make room, but for the newest one."""
        if picture.cancelled():  # It has left already, and another one may be there.
            return
        del self._readings[key]
        if picture.exception() is not None:  # Whoever waits has it.
            return
        self._kept[key] = picture.result()
        self._kept_bytes += picture.result().pixels.nbytes
        while self._kept_bytes > self._cache_bytes and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.pixels.nbytes

    def _on_thread(self, function: Callable[[], T]) -> asyncio.Future[T]:
        if self._closed:
            raise _Closed
        return asyncio.get_running_loop().run_in_executor(self._threads, function)

    def _read(self, serial: int, image: PromptImage) -> Picture:
        if self._closed:
            raise _Closed
        return Picture(serial=serial, pixels=self._decode(image))

    def _decode(self, image: PromptImage) -> torch.Tensor:
        """Reads, turns upright and resizes."""
        kind = _FORMATS[image.media_type]
        try:
            opened: Image.Image = Image.open(io.BytesIO(image.data), formats=[kind])
        except UnidentifiedImageError:
            raise ValueError(f"it has no header of a {kind} file") from None
        if opened.width * opened.height > _MAX_PIXELS:
            raise ValueError(
                f"it has {opened.width}x{opened.height} pixels, at most {_MAX_PIXELS} are taken"
            )
        colours = _on_white(_upright(opened))
        size = self.processor.size
        height, width = smart_resize(
            colours.height,
            colours.width,
            factor=self._stride,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
        )
        resized = colours.resize((width, height), self.processor.resample)
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _upright(opened: Image.Image) -> Image.Image:
    """Undoes the orientation that stands in the header, where the client looks for it.

    Pillow's own function writes the EXIF anew, and fails where that has an odd value.
    """
    orientation: Any = None
    if "exif" in opened.info:
        orientation = opened.getexif().get(ExifTags.Base.Orientation)
    turn = _UPRIGHT.get(orientation)
    return opened if turn is None else opened.transpose(turn)


def _on_white(image: Image.Image) -> Image.Image:
    """The colours as transformers makes them, which puts what is transparent on white."""
    image.load()  # A PNG may name its transparent colour late.
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    if image.mode != "RGBA":
        image = image.convert("RGBA")
    colours = Image.new("RGBA", image.size, (255, 255, 255, 255))
    colours = Image.alpha_composite(colours, image)
    return colours.convert("RGB")
