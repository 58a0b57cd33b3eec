"""The images of trajectories, each once, beside the trajectory files: `images/SHA256.png`.

Invariant: a file has the bytes whose hash is its name, whole: it is written under another name and
renamed. Trajectories of all steps share them, so a resumed run removes none. Nothing decodes an
image here.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Final

from treadle.tracing.trajectories.schema import DIRECTORY

__all__ = ["IMAGE_TYPES", "find_image", "image_bytes", "image_name", "write_image"]

IMAGE_TYPES: Final = {".png": "image/png", ".jpg": "image/jpeg", ".webp": "image/webp"}
"""Media types by the ends of names."""
_SUFFIXES: Final = {media_type: suffix for suffix, media_type in IMAGE_TYPES.items()}
_DIRECTORY: Final = "images"
_NAME: Final = re.compile(r"[0-9a-f]{64}\.(png|jpg|webp)")


def image_name(data: bytes, media_type: str) -> str:
    """Returns the name of an image's file, which messages have in its place.

    Args:
        data: The bytes of the image's file.
    """
    return hashlib.sha256(data).hexdigest() + _SUFFIXES[media_type]


def write_image(directory: Path, name: str, data: bytes) -> int:
    """Writes an image, unless it is there.

    Args:
        data: The bytes of the image's file.

    Returns:
        The number of bytes written.

    Raises:
        OSError: The disk is full or gone.
    """
    path = directory / _DIRECTORY / name
    if path.exists():
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(name + ".partial")
    partial.write_bytes(data)
    os.replace(partial, path)
    return len(data)


def image_bytes(directory: Path) -> int:
    """Returns the size of all images beside the trajectory files of a directory."""
    return sum(path.stat().st_size for path in (directory / _DIRECTORY).glob("*"))


def find_image(run_dir: Path, name: str) -> Path | None:
    """Returns the file of an image of a run; None if there is none, or `name` is no such name."""
    if not _NAME.fullmatch(name):
        return None
    path = run_dir / DIRECTORY / _DIRECTORY / name
    return path if path.is_file() else None
