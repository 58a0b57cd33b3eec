"""The sampling mask of a token, encoded as `TokenChunk.sampling_masks` of the contract.

Invariant: a mask is as short as its shorter form. Nearly all have a few ids, so this is plain
Python: numpy would take longer, and a server of the fake engine does without it.
"""

from collections.abc import Sequence

WHOLE = b"\x00"
"""The mask that keeps the whole vocabulary; a mask of bits begins with it."""


def encode(kept_ids: Sequence[int], drawn: int, vocab_size: int) -> bytes:
    """Returns the mask of a token.

    Args:
        kept_ids: Ids that could have been drawn, ascending; that of the token is among them.
        drawn: Id of the token itself.
    """
    count = len(kept_ids)
    if count <= 1:
        return b""
    if count == vocab_size:
        return WHOLE
    size = 1 + kept_ids[-1] // 8  # Of the bits.
    if count <= size:
        mask, last = bytearray(), -1
        for each in kept_ids:
            if each == drawn:
                continue
            difference, last = each - last, each
            while difference > 127:
                mask.append(difference & 127 | 128)
                difference >>= 7
            mask.append(difference)
        if len(mask) <= size:
            return bytes(mask)
    bits = bytearray(size)
    for each in kept_ids:
        bits[each >> 3] |= 1 << (each & 7)
    return WHOLE + bits


def decode(mask: bytes, drawn: int, vocab_size: int) -> set[int]:
    """Returns the ids that a mask keeps, that of the token itself among them."""
    if mask == WHOLE:
        return set(range(vocab_size))
    if mask.startswith(WHOLE):
        bits = mask[1:]
        return {n for n in range(8 * len(bits)) if bits[n >> 3] >> (n & 7) & 1} | {drawn}
    kept, last, difference, shift = {drawn}, -1, 0, 0
    for byte in mask:
        difference |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            last += difference
            kept.add(last)
            difference = shift = 0
    return kept
