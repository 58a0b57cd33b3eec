"""The images of a rendered chat: how many ids stand for each, and where (extra `hf`).

Invariant: the ids are those of the model's own processor, `processor(text=..., images=...)`,
placeholder for placeholder. A chat template writes one placeholder for an image; this repeats it as
often as the image processor would, which follows from the image's size alone. So only headers are
read: no pixel is decoded here, and the bytes travel to the server as they are.

The placeholder is an added token, at which every tokenizer splits, so that repeating its id is the
same as repeating it in the text.

Pure, but for the files that `from_directory` reads; nothing waits.
"""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import PIL.Image
from transformers import AutoImageProcessor, PreTrainedTokenizerBase

from treadle.agent_loop.errors import RenderError, SetupError, boundary
from treadle.agent_loop.tokens.renderer import PlacedImage, Rendering
from treadle.agent_loop.types import Image

_FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP"}
_ORIENTATION: Final = 0x0112  # EXIF
_ON_ITS_SIDE: Final = (5, 6, 7, 8)  # Others, also those that EXIF does not know, are upright.
_PROCESSORS: Any = AutoImageProcessor  # Untyped in transformers.


class ImagePlaceholders:
    """Places images in the ids of a chat.

    Args:
        processor: transformers' image processor; of a family that tells the number of patches from
            the size (Qwen2-VL, Qwen2.5-VL, Qwen3-VL).
        token: The placeholder that the chat template writes once for each image.
        token_id: Its id.

    Raises:
        SetupError: The image processor is of another family.
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
            SetupError: It does not load or is of another family, or nothing names the placeholder.
        """
        folder = Path(directory)
        try:
            processor = _PROCESSORS.from_pretrained(
                str(folder), local_files_only=True, backend="pil"
            )
        except Exception as error:  # the libraries raise whatever the files make them stumble over
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
        """Ids that stand for an image.

        Raises:
            RenderError: Its header cannot be read, is of another type, or the processor refuses
                its size.
        """
        with boundary(RenderError, f"an {image.mime} image of {len(image.data)} bytes"):
            formats = [_FORMATS[image.mime]]
            with PIL.Image.open(io.BytesIO(image.data), formats=formats) as opened:
                width, height = opened.size
                # Elsewhere than in the header, Pillow would decode a PNG to look for it.
                if "exif" in opened.info and opened.getexif().get(_ORIENTATION) in _ON_ITS_SIDE:
                    width, height = height, width
            patches: int = self._processor.get_number_of_image_patches(height, width)
            merged: int = self._processor.merge_size**2
            return patches // merged

    def place(self, ids: Sequence[int], images: Sequence[Image]) -> Rendering:
        """Repeats the placeholder of each image.

        Args:
            ids: As tokenised, with one placeholder for each image.
            images: In the order of their placeholders.

        Raises:
            RenderError: The numbers differ, or an image cannot be read.
        """
        places = [place for place, token in enumerate(ids) if token == self._token_id]
        if len(places) != len(images):
            raise RenderError(
                f"the chat has {len(places)} placeholders {self._token!r} for {len(images)} "
                "images: a text holds the placeholder itself, or the chat template does not "
                "write the images of this role"
            )
        expanded: list[int] = []
        placed: list[PlacedImage] = []
        done = 0
        for place, image in zip(places, images, strict=True):
            expanded += ids[done:place]
            count = self.num_tokens(image)
            placed.append(PlacedImage(image=image, start=len(expanded), num_tokens=count))
            expanded += [self._token_id] * count
            done = place + 1
        expanded += ids[done:]
        return Rendering(ids=tuple(expanded), images=tuple(placed))
