"""An input of a fuzz target: a few parts, each a line of text and bytes; and its file.

Invariant: a file has one line of JSON per part, `{"head", "text"}`, or `{"head", "base64"}` where
the bytes are no UTF-8. So an input can be read, reviewed and edited, and what is read is what was
written.

What the head and the body of a part are is the target's: the name of a method and a message, a
request line and a body, a path and the content of the file.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
"""One folder per target."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of an input."""

    head: str
    body: bytes


Input = tuple[Part, ...]


def write_input(parts: Sequence[Part]) -> str:
    """Returns the text of an input's file."""
    return "".join(f"{json.dumps(_written(part), ensure_ascii=False)}\n" for part in parts)


def read_input(text: str) -> Input:
    """Returns the input of a file's text."""
    values = [json.loads(line) for line in text.split("\n") if line]
    return tuple(
        Part(
            value["head"],
            base64.b64decode(value["base64"]) if "base64" in value else value["text"].encode(),
        )
        for value in values
    )


def read_corpus(target: str) -> dict[str, Input]:
    """Returns the inputs of a target by the names of their files."""
    files = sorted((CORPUS / target).glob("*.jsonl"))
    return {file.stem: read_input(file.read_text(encoding="utf-8")) for file in files}


def _written(part: Part) -> dict[str, str]:
    try:
        text = part.body.decode()
    except UnicodeDecodeError:
        return {"head": part.head, "base64": base64.b64encode(part.body).decode()}
    return {"head": part.head, "text": text}
