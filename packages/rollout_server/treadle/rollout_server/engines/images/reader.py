"""Image decoding and resizing, on a thread pool.

Invariant: an image is identified by its bytes. Each distinct image has a unique serial number,
so two prompts share a cached prefix only as far as their images are equal too
(engines compare serial numbers in place of placeholder ids). An image that cannot
be decoded, or whose number of placeholders is wrong, is rejected here, before the sequence
takes any resources.

Who waits: `ImageDecoder.read` waits for the thread that hashes an image and the one that
decodes it. A second request for an image that is being decoded waits for the first decode, on
the event loop and not on a thread: eight samples of one prompt arrive together, decode its
images once and leave the other threads to other prompts. A decode that nobody waits for any
more is cancelled, unless it has begun. Decoded images stay in an LRU cache. Serial numbers are
kept longer, so an image that is decoded again still matches its old prefixes. The compute
thread receives pixels, and cuts and normalises only the images that no cached prefix covers.

Sizes: an image of H times W pixels after resizing has H * W / (patch_size * merge_size)^2
placeholders.
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

from treadle.rollout_server.engine import PromptImage
from treadle.rollout_server.errors import ImageUnreadable, InvalidField, PlaceholderMismatch

_FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP"}
_CONFIGURATIONS = ("preprocessor_config.json", "processor_config.json")
_MAX_PIXELS = 1 << 26  # Pillow uses up to 16 bytes per pixel; more is a mistake or an attack.
_MAX_SERIALS = 1 << 16  # About 10 MiB.
_THREADS = 4  # Decoding and resizing release the GIL.
_UPRIGHT = {  # EXIF orientation -> the transpose that undoes it.
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
class DecodedImage:
    """A decoded and resized image, ready for the vision tower.

    Attributes:
        serial: Serial number; equal only for images with equal bytes.
        pixels: ``[3, H, W]``, uint8; red, green, blue.
    """

    serial: int
    pixels: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedImage:
    """An image and the placeholder ids that stand for it in a sequence.

    Attributes:
        start: Index of the first placeholder id.
        grid: Number of rows and columns of placeholders.
    """

    start: int
    grid: tuple[int, int]
    image: DecodedImage

    @property
    def stop(self) -> int:
        """Index after the last placeholder id."""
        return self.start + self.grid[0] * self.grid[1]


class _Closed(Exception):
    """The reader was closed before a thread decoded this image."""


@dataclass(slots=True, eq=False)
class _PendingImage:
    """An image that is being decoded, and the number of prompts that wait for it."""

    decoded: asyncio.Future[DecodedImage]
    num_waiting: int = 0


class ImageDecoder:
    """Decodes the images of prompts for one model. Used from a single event loop.

    Args:
        directory: Model directory; contains the configuration of the image processor.
        placeholder_id: Token id that stands for images in prompts.
        cache_bytes: Maximum memory for decoded images.

    Raises:
        OSError: The directory has no image processor.
        ValueError: The image processor is not of the Qwen2-VL family.
    """

    def __init__(self, directory: Path, *, placeholder_id: int, cache_bytes: int) -> None:
        # Here, because it takes over a second, which servers of text models need not spend.
        from transformers import AutoImageProcessor
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
            smart_resize,
        )

        if not any((directory / name).is_file() for name in _CONFIGURATIONS):
            raise FileNotFoundError(
                f"{directory} has no {_CONFIGURATIONS[0]}: copy the model's image processor there"
            )
        # torchvision resizes differently; "pil" gives the same pixels with and without it.
        processors: Any = AutoImageProcessor  # Untyped in transformers.
        self.processor: Any = processors.from_pretrained(
            directory, local_files_only=True, backend="pil"
        )
        self._smart_resize = smart_resize
        if not isinstance(self.processor, Qwen2VLImageProcessorPil):
            raise ValueError(
                f"{directory} has the image processor {type(self.processor).__name__}, but only "
                "that of Qwen2-VL, Qwen2.5-VL and Qwen3-VL is supported"
            )
        self._placeholder_id = placeholder_id
        self._stride = self.processor.patch_size * self.processor.merge_size
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._cached: OrderedDict[bytes, DecodedImage] = OrderedDict()  # Least recently used first.
        self._pending: dict[bytes, _PendingImage] = {}
        self._numbers = itertools.count()
        self._serials: OrderedDict[bytes, int] = OrderedDict()  # Least recently used first.
        self._closed = False
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="images")

    async def read(
        self, images: Sequence[PromptImage], prompt: Sequence[int]
    ) -> tuple[PlacedImage, ...]:
        """Decodes the images of a prompt, one after the other; none once the reader is closed.

        Raises:
            ImageUnreadable: An image cannot be decoded, or is too large.
            PlaceholderMismatch: The number of placeholders of an image is wrong.
            InvalidField: An id in the place of an image is not the placeholder.
        """
        for index, image in enumerate(images):
            self._check_ids(index, image, prompt)
        placed = []
        for index, image in enumerate(images):
            try:
                decoded = await self._decoded(image)
            except _Closed:
                return ()
            except Exception as error:  # Pillow may raise anything on a malformed file.
                raise ImageUnreadable(index, image.media_type, str(error)) from error
            placed.append(self._place(index, image, decoded))
        return tuple(placed)

    def close(self) -> None:
        """Ends the threads once their current images are decoded. Idempotent."""
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

    def _place(self, index: int, image: PromptImage, decoded: DecodedImage) -> PlacedImage:
        _, height, width = decoded.pixels.shape
        grid = (height // self._stride, width // self._stride)
        if grid[0] * grid[1] != image.num_tokens:
            raise PlaceholderMismatch(index, image.start, image.num_tokens, grid[0] * grid[1])
        return PlacedImage(start=image.start, grid=grid, image=decoded)

    async def _decoded(self, image: PromptImage) -> DecodedImage:
        """Returns the image from the cache, or decodes it."""
        # Not on the decoding threads: a cached image need not wait for them.
        key = await asyncio.to_thread(_digest, image.data)
        if (cached := self._cached.get(key)) is not None:
            self._cached.move_to_end(key)
            return cached
        if (pending := self._pending.get(key)) is None:
            decoded = self._on_thread(partial(self._read, self._serial(key), image))
            pending = self._pending[key] = _PendingImage(decoded)
            decoded.add_done_callback(partial(self._cache, key))
        pending.num_waiting += 1
        try:
            return await asyncio.shield(pending.decoded)
        finally:
            pending.num_waiting -= 1
            if not pending.num_waiting and pending.decoded.cancel():
                del self._pending[key]

    def _serial(self, key: bytes) -> int:
        if (serial := self._serials.pop(key, None)) is None:
            serial = next(self._numbers)
        self._serials[key] = serial
        if len(self._serials) > _MAX_SERIALS:
            self._serials.popitem(last=False)
        return serial

    def _cache(self, key: bytes, decoded: asyncio.Future[DecodedImage]) -> None:
        """Caches a decoded image; evicts the least recently used ones, never the newest."""
        if decoded.cancelled():  # It was removed already; a new decode may have its key.
            return
        del self._pending[key]
        if decoded.exception() is not None:  # The waiters receive it.
            return
        self._cached[key] = decoded.result()
        self._cached_bytes += decoded.result().pixels.nbytes
        while self._cached_bytes > self._cache_bytes and len(self._cached) > 1:
            _, oldest = self._cached.popitem(last=False)
            self._cached_bytes -= oldest.pixels.nbytes

    def _on_thread(self, function: Callable[[], T]) -> asyncio.Future[T]:
        if self._closed:
            raise _Closed
        return asyncio.get_running_loop().run_in_executor(self._threads, function)

    def _read(self, serial: int, image: PromptImage) -> DecodedImage:
        if self._closed:
            raise _Closed
        return DecodedImage(serial=serial, pixels=self._decode(image))

    def _decode(self, image: PromptImage) -> torch.Tensor:
        """Decodes an image, turns it upright and resizes it."""
        kind = _FORMATS[image.media_type]
        try:
            opened: Image.Image = Image.open(io.BytesIO(image.data), formats=[kind])
        except UnidentifiedImageError:
            raise ValueError(f"it does not start with a {kind} header") from None
        if opened.width * opened.height > _MAX_PIXELS:
            raise ValueError(
                f"it has {opened.width}x{opened.height} pixels, the maximum is {_MAX_PIXELS}"
            )
        colours = _on_white(_upright(opened))
        size = self.processor.size
        height, width = self._smart_resize(
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
    """Undoes the EXIF orientation of the header, which the client also reads.

    Pillow's own function rewrites the EXIF data and fails on unusual values.
    """
    orientation: Any = None
    if "exif" in opened.info:
        orientation = opened.getexif().get(ExifTags.Base.Orientation)
    turn = _UPRIGHT.get(orientation)
    return opened if turn is None else opened.transpose(turn)


def _on_white(image: Image.Image) -> Image.Image:
    """Converts to RGB as transformers does: transparent pixels become white."""
    image.load()  # A PNG may declare its transparent colour late.
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    if image.mode != "RGBA":
        image = image.convert("RGBA")
    colours = Image.new("RGBA", image.size, (255, 255, 255, 255))
    colours = Image.alpha_composite(colours, image)
    return colours.convert("RGB")
