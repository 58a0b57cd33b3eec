"""Positions of the tokens of a sequence with images, in time, height and width.

Invariant: those of transformers' `get_rope_index` for still images. Text advances all three axes
together. An image has one time, and its own rows and columns; the text after it continues behind
the larger of the two (multimodal rotary embedding, arXiv:2409.12191, section 2.1). The positions of
a prefix do not depend on what comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Grid = tuple[int, int]
"""Rows and columns of an image's embeddings."""


def positions_of(length: int, images: Sequence[tuple[int, Grid]] = ()) -> NDArray[np.int64]:
    """Returns the [3, L] positions of a sequence.

    Args:
        images: Place of the first placeholder and grid of each image, in the order of their places;
            all of them end within the sequence.
    """
    positions = np.arange(length, dtype=np.int64)[None].repeat(3, axis=0)
    offset = done = 0
    for start, (rows, columns) in images:
        positions[:, done:start] += offset
        begin, done = start + offset, start + rows * columns
        positions[0, start:done] = begin
        positions[1, start:done] = begin + np.arange(rows).repeat(columns)
        positions[2, start:done] = begin + np.tile(np.arange(columns), rows)
        offset = begin + max(rows, columns) - done
    positions[:, done:] += offset
    return positions
