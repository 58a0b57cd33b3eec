"""Sampling masks, decoded: which ids could have been drawn in the place of each token.

They come as the rollout contract has them (`TokenChunk.sampling_masks`). A step has one per loss
token, so nothing here looks at them one by one, except at the few that are bits.

Shape suffixes: T loss tokens, N kept ids of all of them, the tokens themselves left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from treadle.policy.client.types import TrainSequence

WHOLE = b"\x00"
"""The mask that keeps the whole vocabulary; a mask of bits begins with it."""


class DecodedMasks(NamedTuple):
    """The ids beside the tokens themselves, as pairs, and the tokens whose mask is everything."""

    rows_N: NDArray[np.int64]
    ids_N: NDArray[np.int64]
    whole_T: NDArray[np.bool_]


def masks_of(sequences: Sequence[TrainSequence]) -> list[bytes]:
    """Returns the masks of the loss tokens of some sequences; none if no sequence has any."""
    if not any(sequence.sampling_masks for sequence in sequences):
        return []
    return [
        mask
        for sequence in sequences
        for mask in sequence.masks_at_loss_tokens or [WHOLE] * sequence.num_loss_tokens
    ]


def decode(masks: Sequence[bytes], vocab_size: int) -> DecodedMasks:
    """Returns the kept ids of [T] masks.

    Raises:
        ValueError: A mask is cut off, or has an id outside the vocabulary.
    """
    listed = [b"" if mask.startswith(WHOLE) else mask for mask in masks]
    data = np.frombuffer(b"".join(listed), np.uint8)
    sizes_T = np.fromiter(map(len, listed), np.int64, len(listed))
    ends_T = np.cumsum(sizes_T)[sizes_T > 0] - 1
    if (data[ends_T] > 127).any():
        raise ValueError("a sampling mask ends within a number: the rollout server is broken")
    last_N = np.flatnonzero(data < 128)
    first_N = np.append(0, last_N + 1)[: len(last_N)]
    shifts = 7 * (np.arange(len(data)) - np.repeat(first_N, last_N - first_N + 1))
    sevens = (data & 127).astype(np.int64) << shifts
    ends_N = np.cumsum(sevens)[last_N]
    differences_N = np.diff(ends_N, prepend=0)
    rows_N = np.repeat(np.arange(len(listed)), sizes_T)[last_N]
    begins = np.flatnonzero(np.diff(rows_N, prepend=-1))
    before = (ends_N - differences_N)[begins]
    ids_N = ends_N - np.repeat(before, np.diff(begins, append=len(rows_N))) - 1
    for row, mask in enumerate(masks):
        if len(mask) > 1 and mask.startswith(WHOLE):
            bits = np.unpackbits(np.frombuffer(mask, np.uint8, offset=1), bitorder="little")
            kept = np.flatnonzero(bits)
            ids_N = np.append(ids_N, kept)
            rows_N = np.append(rows_N, np.full(len(kept), row))
    if (largest := int(ids_N.max(initial=0))) >= vocab_size:
        raise ValueError(
            f"a sampling mask keeps id {largest}, and the vocabulary has {vocab_size}: the rollout "
            "server has another model"
        )
    whole_T = np.fromiter((mask == WHOLE for mask in masks), np.bool_, len(masks))
    return DecodedMasks(rows_N, ids_N, whole_T)
