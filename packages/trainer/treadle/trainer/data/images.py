"""The images of a row: its column `images`, and its messages with them.

Invariant: every image has one place, an `<image>` mark in a message. A row whose marks do not match
its images is an error. The bytes of the row or its file are passed on unchanged.

The column is a list of mappings, as written by verl and the library `datasets`: `bytes` of a PNG,
JPEG or WebP file, or the `path` of such a file, for formats without bytes such as JSONL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from treadle.agent_loop import IMAGE_MARK, Image, Message
from treadle.trainer.data.messages import read_message
from treadle.trainer.data.row import Row

__all__ = ["row_messages", "with_images"]

_SIGNATURES: Final[Mapping[str, tuple[bytes, bytes]]] = {
    "image/png": (b"\x89PNG\r\n\x1a\n", b""),
    "image/jpeg": (b"\xff\xd8\xff", b""),
    "image/webp": (b"RIFF", b"WEBP"),
}
"""The beginning of a file of each type, and the bytes from its ninth on."""


def row_messages(row: Row) -> tuple[Message, ...]:
    """Returns the messages of a row's prompt, with the images at their marks.

    Where no message has a mark, the images come before the text of the first message of the user.

    Raises:
        ValueError: The column `images` has another form, an image cannot be read, or the prompt
            has no place for it; or the arguments of a call have a null (see `Row.exact`).
    """
    prompt = row.columns["prompt"]
    assert isinstance(prompt, list), "read_rows has checked it"
    images = row.columns.get("images")
    messages = [
        read_message(value, f"prompt[{index}]", exact=row.exact, images=bool(images))
        for index, value in enumerate(prompt)
    ]
    return with_images(messages, images)


def with_images(
    messages: Sequence[Message], column: object, *, name: str = "images"
) -> tuple[Message, ...]:
    """Returns messages with the images of a row at their marks; see `row_messages`.

    Args:
        column: Value of the row's column; None: it is empty.

    Raises:
        ValueError: See `row_messages`.
    """
    images = _images(column, name)
    if not images:
        return tuple(messages)
    counts = [message.content.count(IMAGE_MARK) for message in messages]
    if not any(counts):
        of_user = [index for index, message in enumerate(messages) if message.role == "user"]
        if not of_user:
            raise ValueError("the prompt has no message of the user that could show the images")
        counts[of_user[0]] = len(images)
    if sum(counts) != len(images):
        raise ValueError(
            f"the prompt has {sum(counts)} {IMAGE_MARK} marks for {len(images)} images: write one "
            "for each image, or none, which puts the images before the text"
        )
    placed: list[Message] = []
    begin = 0
    for message, count in zip(messages, counts, strict=True):
        placed.append(replace(message, images=images[begin : begin + count]))
        begin += count
    return tuple(placed)


def _images(column: object, name: str) -> tuple[Image, ...]:
    if column is None:
        return ()
    if not isinstance(column, Sequence) or isinstance(column, str | bytes):
        raise ValueError(f"the column {name!r} must be a list, got {column!r:.80}")
    return tuple(_image(item, f"{name}[{index}]") for index, item in enumerate(column))


def _image(item: object, where: str) -> Image:
    given = item if isinstance(item, Mapping) else {}
    data, path = given.get("bytes"), given.get("path")
    if not isinstance(data, bytes) and isinstance(path, str):
        try:
            data = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise ValueError(f"{where}: cannot read {path}: {error.strerror}") from None
    if not isinstance(data, bytes):
        raise ValueError(
            f"{where} must be a mapping with the bytes of an image's file or its path, got "
            f"{item!r:.80}"
        )
    for mime, (first, ninth) in _SIGNATURES.items():
        if data.startswith(first) and data[8:].startswith(ninth):
            return Image(data=data, mime=mime)
    raise ValueError(f"{where} begins with {data[:12]!r}: it is none of PNG, JPEG and WebP")
