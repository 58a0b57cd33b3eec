"""The placeholders of images in a rendered chat (extra `[hf]`).

Invariant: the ids equal those of the model's own processor, `processor(text=..., images=...)`. A
chat template writes one placeholder per image. This module repeats it as often as the image
processor would, which depends only on the image's size. So it reads only headers: it decodes no
pixel, and the bytes are sent to the server unchanged.

The placeholder is an added token, at which every tokenizer splits, so repeating its id equals
repeating it in the text.

Pure, except that `from_directory` reads files; nothing waits.
"""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import PIL.Image
from transformers import AutoImageProcessor, PreTrainedTokenizerBase

from treadle.agent_loop.errors import RenderError, SetupError, boundary
from treadle.agent_loop.tokens.renderer import PlacedImage, Rendering
from treadle.agent_loop.types import Image, Message

_FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP"}
_ORIENTATION: Final = 0x0112  # EXIF
_ON_ITS_SIDE: Final = (5, 6, 7, 8)  # All other values, including invalid ones, mean upright.
_PROCESSORS: Any = AutoImageProcessor  # Untyped in transformers.


class ImagePlaceholders:
    """Expands the placeholders of images in the ids of a chat.

    Args:
        processor: An image processor of transformers that computes the number of patches from
            the image's size (Qwen2-VL, Qwen2.5-VL, Qwen3-VL).
        token: The placeholder that the chat template writes once per image.

    Raises:
        SetupError: The image processor belongs to another family.
    """

    def __init__(self, processor: Any, *, token: str, token_id: int) -> None:
        if not hasattr(processor, "get_number_of_image_patches") or not hasattr(
            processor, "merge_size"
        ):
            raise SetupError(
                f"the image processor {type(processor).__name__} does not tell how many ids an "
                "image takes; those of Qwen2-VL, Qwen2.5-VL and Qwen3-VL do"
            )
        self._processor = processor
        self._token = token
        self._token_id = token_id

    @classmethod
    def from_directory(
        cls, directory: str | Path, tokenizer: PreTrainedTokenizerBase
    ) -> "ImagePlaceholders":
        """Loads the image processor of a model directory.

        Raises:
            SetupError: It does not load or belongs to another family, or no file names the
                placeholder.
        """
        folder = Path(directory)
        try:
            processor = _PROCESSORS.from_pretrained(
                str(folder), local_files_only=True, backend="pil"
            )
        except Exception as error:  # the libraries raise errors of any type for bad files
            raise SetupError(
                f"the image processor in {folder} does not load: {type(error).__name__}: {error}"
            ) from error
        names: Any = tokenizer
        config = folder / "config.json"
        settings = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        token_id = settings.get("image_token_id", getattr(names, "image_token_id", None))
        if token_id is None:
            raise SetupError(
                f"{folder} has an image processor, and neither its config.json nor its tokenizer "
                "has image_token_id: copy the model's config.json there"
            )
        return cls(processor, token=names.convert_ids_to_tokens(token_id), token_id=token_id)

    def num_tokens(self, image: Image) -> int:
        """Returns the number of placeholder ids of an image.

        Raises:
            RenderError: The header cannot be read or has another type, or the processor refuses
                the size.
        """
        with boundary(RenderError, f"an {image.mime} image of {len(image.data)} bytes"):
            formats = [_FORMATS[image.mime]]
            with PIL.Image.open(io.BytesIO(image.data), formats=formats) as opened:
                width, height = opened.size
                # Only from the header: otherwise Pillow would decode a PNG to look for EXIF.
                if "exif" in opened.info and opened.getexif().get(_ORIENTATION) in _ON_ITS_SIDE:
                    width, height = height, width
            patches: int = self._processor.get_number_of_image_patches(height, width)
            merged: int = self._processor.merge_size**2
            return patches // merged

    def place(
        self,
        ids: Sequence[int],
        messages: Sequence[Message],
        encode: Callable[[str], Sequence[int]],
    ) -> Rendering:
        """Repeats the placeholder of each image; one that a text holds becomes plain text.

        Args:
            ids: Tokenised chat with one placeholder per image, and those of the texts.
            messages: In the order of the chat.
            encode: Returns the ids of a text.

        Raises:
            RenderError: The placeholders are not those of the messages, or an image cannot be read.
        """
        places = [place for place, token in enumerate(ids) if token == self._token_id]
        parts = [part for message in messages for part in message.parts]
        owners: list[Image | None] = []
        for part in parts:
            owners += [None] * part.count(self._token) if isinstance(part, str) else [part]
        if len(places) != len(owners):
            raise RenderError(
                f"the chat has {len(places)} placeholders {self._token!r}, and its messages have "
                f"{len(owners)}: the chat template does not write images of this role, or writes "
                "a text with the placeholder elsewhere than in a message's content"
            )
        expanded: list[int] = []
        placed: list[PlacedImage] = []
        done = 0
        for place, image in zip(places, owners, strict=True):
            expanded += ids[done:place]
            if image is None:
                expanded += [*encode(self._token[:2]), *encode(self._token[2:])]
            else:
                count = self.num_tokens(image)
                placed.append(PlacedImage(image=image, start=len(expanded), num_tokens=count))
                expanded += [self._token_id] * count
            done = place + 1
        expanded += ids[done:]
        return Rendering(ids=tuple(expanded), images=tuple(placed))
