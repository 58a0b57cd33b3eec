"""The text of a trajectory's row in the trajectory files, made where its objects are.

A loop worker makes it of its trajectories, and the driver writes it as it came. Of others the
driver makes it, with the same bytes. Importing this loads no Arrow.

It is made on the caller's event loop: 0.5 ms of processor time for 2,000 tokens in 5 turns, 29 ms
for 100,000 (Qwen2.5's tokenizer; docs/adr/0017).
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from treadle.agent_loop import IntArray, Message, Trajectory
from treadle.agent_loop.span_content import messages_content

__all__ = ["StoredText", "stored_text", "to_json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredText:
    """The text of a row; UTF-8.

    Attributes:
        messages: The column of this name: JSON.
        response: The column of this name.
        spans: For each sample, the text of all its N spans and where each begins in it, [N + 1].
    """

    messages: bytes
    response: bytes
    spans: tuple[tuple[bytes, IntArray], ...]


def stored_text(
    trajectory: Trajectory, decode: Callable[[Sequence[int]], str], *, response_characters: int
) -> StoredText:
    """Returns the text of a trajectory's row.

    Args:
        decode: Token ids to text, special tokens included.
    """
    contents = zip(trajectory.messages, messages_content(trajectory.messages), strict=True)
    messages = [
        content | {"images": _image_names(message)} if message.images else content
        for message, content in contents
    ]
    return StoredText(
        messages=_utf8(to_json(messages)),
        response=_utf8(trajectory.final_text[:response_characters]),
        spans=tuple(
            _joined(decode(sample.ids[start:stop]) for _, start, stop, _ in sample.runs())
            for sample in trajectory.samples
        ),
    )


def to_json(value: object) -> str:
    """Returns JSON, with the string of what JSON does not have: rows may hold that."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _image_names(message: Message) -> list[str]:
    # Loads Arrow, which takes memory in each worker.
    from treadle.tracing.trajectories import image_name

    return [image_name(image.data, image.mime) for image in message.images]


def _joined(texts: Iterable[str]) -> tuple[bytes, IntArray]:
    encoded = [_utf8(text) for text in texts]
    return b"".join(encoded), IntArray(accumulate(map(len, encoded), initial=0))


def _utf8(text: str) -> bytes:
    """Returns the text, with half a surrogate pair as its escape."""
    return text.encode(errors="backslashreplace")
