"""The schedule of a collective weight update: which tensors share a broadcast, and in which order.

It is part of the contract: sender and receiver both compute it from the announcement, and no
message carries it. `tests/golden/collective_schedule.json` has examples for other languages. It
uses only the standard library, so that an engine's worker processes need no protobuf.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

__all__ = ["Bucket", "Part", "schedule"]

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One whole tensor in a bucket: its index in the announcement, its first byte, its length."""

    index: int
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What one broadcast carries, from rank `sender`."""

    sender: int
    num_bytes: int
    parts: tuple[Part, ...]


def schedule(sizes: Sequence[int], senders: Sequence[int], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Returns the buckets of an announcement, in the order of their broadcasts.

    A sender's tensors are packed in the announced order, each at a multiple of 16 bytes, as many as
    fit into `bucket_bytes`; a larger tensor has its own bucket. The first buckets of all senders
    come first, by rank, then their second ones, and so on: while one is broadcast, the other
    senders gather theirs.

    Args:
        sizes: Number of bytes per tensor.
        senders: Rank that sends each tensor.
        bucket_bytes: Maximum size of a bucket, at least 1.
    """
    filled: dict[int, list[list[Part]]] = {sender: [[]] for sender in sorted(set(senders))}
    for index, (size, sender) in enumerate(zip(sizes, senders, strict=True)):
        parts = filled[sender][-1]
        start = -(-_end(parts) // _ALIGNMENT) * _ALIGNMENT
        if parts and start + size > bucket_bytes:
            parts, start = [], 0
            filled[sender].append(parts)
        parts.append(Part(index=index, start=start, num_bytes=size))
    of_each = [
        [Bucket(sender=sender, num_bytes=_end(parts), parts=tuple(parts)) for parts in lists]
        for sender, lists in filled.items()
    ]
    return tuple(bucket for turn in zip_longest(*of_each) for bucket in turn if bucket is not None)


def _end(parts: Sequence[Part]) -> int:
    return parts[-1].start + parts[-1].num_bytes if parts else 0
