"""Tokenises a chat piece by piece, so that pieces whose ids are known are not tokenised again.

Invariant: the ids are those of the whole text. A tokenizer cuts a text at its added tokens first
and tokenises each piece between them alone. `PieceEncoder.of` returns an encoder only for a
tokenizer of which that is all: a byte-level BPE whose added tokens take nothing from beside them.
Then the ids of a piece depend on its text only, and decoding ids that the tokenizer made of a piece
gives a text of the same ids.

Any thread may call; nothing waits.
"""

import itertools
import json
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

# The pieces of prompts that are kept: those of all rows (the tools, the system's message, the
# headers), and the questions of the latest rows, each of which begins several trajectories.
_MAX_PIECES: Final = 64
_MAX_CHARACTERS: Final = 1 << 15
_NOTHING_KNOWN: Final[Mapping[str, Sequence[int]]] = {}


class PieceEncoder:
    """The pieces of one tokenizer. Made by `of`."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend: Any = backend
        added = self._backend.get_added_tokens_decoder()
        self._added = {token.content: i for i, token in added.items()}
        self._added_ids = frozenset(added)
        # As the tokenizer does, the longest of those that begin at one place.
        longest_first = sorted(self._added, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._kept: dict[str, array[int]] = {}

    @classmethod
    def of(cls, backend: Tokenizer) -> "PieceEncoder | None":
        """Returns the encoder of a tokenizer; None if it may treat a piece by what is beside it."""
        return cls(backend) if _treats_pieces_alone(backend) else None

    def encode(
        self, text: str, *, known: Mapping[str, Sequence[int]] = _NOTHING_KNOWN, keep: bool = False
    ) -> tuple[int, ...]:
        """Returns the ids of a text.

        Args:
            text: Added tokens in it become their ids.
            known: The ids of some pieces.
            keep: Whether to keep the ids of its pieces for other texts.

        Raises:
            Exception: The tokenizer refuses the text.
        """
        parts = self._cut.split(text)  # piece, added token, piece, ..., piece
        kept = self._kept
        found = {part: known.get(part) or kept.get(part) for part in parts[::2] if part}
        new = [part for part, ids in found.items() if ids is None]
        if new:
            encodings = self._backend.encode_batch_fast(new, add_special_tokens=False)
            made = {part: each.ids for part, each in zip(new, encodings, strict=True)}
            found |= made
            if keep:
                self._keep(made)
        whole: list[int] = []
        for place, part in enumerate(parts):
            if place % 2:
                whole.append(self._added[part])
            elif part:
                whole.extend(found[part] or ())
        return tuple(whole)

    def pieces(
        self, ids: Sequence[int], written: Iterable[tuple[int, int]]
    ) -> dict[str, tuple[int, ...]]:
        """Returns the whole pieces that are known of a sequence: their texts, and their ids.

        Args:
            written: The parts [start, stop) that this tokenizer made, each of one text, of which
                what is before the first and after the last added token may be missing.
        """
        found: dict[tuple[int, ...], None] = {}
        for start, stop in written:
            part = tuple(ids[start:stop])
            edges = [place for place, each in enumerate(part) if each in self._added_ids]
            for before, after in itertools.pairwise(edges):
                if before + 1 < after:
                    found[part[before + 1 : after]] = None
        pieces = list(found)
        texts = self._backend.decode_batch(pieces, skip_special_tokens=False)
        return dict(zip(texts, pieces, strict=True))

    def _keep(self, made: Mapping[str, Sequence[int]]) -> None:
        for part, ids in made.items():
            if len(part) <= _MAX_CHARACTERS:
                while len(self._kept) >= _MAX_PIECES:
                    self._kept.pop(next(iter(self._kept)), None)
                self._kept[part] = array("I", ids)


def _treats_pieces_alone(backend: Any) -> bool:
    model = backend.model
    return (
        type(model) is BPE
        and not model.dropout
        and not model.continuing_subword_prefix
        and not model.end_of_word_suffix
        and all(model.token_to_id(byte) is not None for byte in ByteLevel.alphabet())
        and not backend.encode_special_tokens
        and _state(backend.normalizer).get("type", "NFC") == "NFC"
        and _state(backend.decoder).get("type") == "ByteLevel"
        and _keeps_all(_state(backend.pre_tokenizer))
        and not any(
            token.lstrip or token.rstrip or token.single_word or token.normalized
            for token in backend.get_added_tokens_decoder().values()
        )
    )


def _keeps_all(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Returns whether it cuts a text, wherever that stands, and writes its bytes at last."""
    *cuts, last = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return (
        last.get("type") == "ByteLevel"
        and not last["add_prefix_space"]
        and all(
            each["type"] == "Digits" or (each["type"] == "Split" and each["behavior"] != "Removed")
            for each in cuts
        )
    )


def _state(part: Any) -> dict[str, Any]:
    """Returns the settings of a part of a tokenizer; none if there is no such part."""
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state
