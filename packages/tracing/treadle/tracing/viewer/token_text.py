"""Cuts the text of a span into the text of its tokens, with the vocabulary of `tokenizer.json`.

Invariant: the pieces of a span are used only if, put together, they are the span's stored text. A
tokenizer of another kind, or another model in the same directory, so gives no pieces at all and
never wrong ones. Byte-level vocabularies are read, which Qwen, Llama 3 and most others have.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path

__all__ = ["TokenText"]


def _byte_letters() -> dict[str, int]:
    """Returns the byte that each letter of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves; the other bytes have the letters from U+0100
    on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}


class TokenText:
    """The vocabulary of a model directory.

    Raises:
        OSError: The file cannot be read.
        ValueError: It has no vocabulary of pieces.
    """

    def __init__(self, path: Path) -> None:
        try:
            content = json.loads(path.read_bytes())
            vocabulary = content["model"]["vocab"]
            added = {int(token["id"]): str(token["content"]) for token in content["added_tokens"]}
            self._pieces = {int(id_): str(piece) for piece, id_ in vocabulary.items()}
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{path} has no vocabulary that can be read: {error!r:.200}") from None
        self._added = {id_: text.encode(errors="replace") for id_, text in added.items()}
        self._letters = _byte_letters()

    def pieces(self, ids: Sequence[int], text: str) -> list[str] | None:
        """Returns the text of each token; None if they do not make up `text`.

        A character of several tokens belongs to the last of them; the others are empty.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        found: list[str] = []
        for id_ in ids:
            piece = self._bytes(id_)
            if piece is None:
                return None
            found.append(decoder.decode(piece))
        if found:
            found[-1] += decoder.decode(b"", final=True)
        return found if "".join(found) == text else None

    def _bytes(self, id_: int) -> bytes | None:
        if id_ in self._added:
            return self._added[id_]
        piece = self._pieces.get(id_)
        if piece is None:
            return None
        try:
            return bytes(self._letters[letter] for letter in piece)
        except KeyError:
            return None
