"""Small changes of weights and their delta encoding, without torch or numpy.

Few elements change, spread over every tensor, so that a change of a large model is fast to make
and send, and still affects every sequence.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence

from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.engine import NamedTensor

_EACH = 4096
"""Approximate number of elements that change per tensor; smaller tensors change entirely."""


def changed(old: Sequence[NamedTensor], new: Sequence[NamedTensor]) -> list[NamedTensor]:
    """Returns copies of the old tensors with some evenly spread elements of the new ones."""
    made: list[NamedTensor] = []
    for before, after in zip(old, new, strict=True):
        data = memoryview(bytearray(before.data))
        for _, element in _some(before):
            data[element] = after.data[element]
        made.append(NamedTensor(spec=before.spec, data=data))
    return made


def encoded(old: Sequence[NamedTensor], new: Sequence[NamedTensor]) -> list[bytes]:
    """Returns the encoded changes per tensor, if `changed` made `new` of `old` or the reverse."""
    return [_encode(before, after) for before, after in zip(old, new, strict=True)]


def delta_encoding(
    base: int, changes: Sequence[bytes], new: Sequence[NamedTensor]
) -> sync.DeltaEncoding:
    """Returns the announcement of an update by these changes of version `base`."""
    return sync.DeltaEncoding(
        base_weight_version=base,
        encoded_bytes=[len(change) for change in changes],
        crc32=[zlib.crc32(tensor.data) for tensor in new],
    )


def encode(places: Sequence[int], values: Sequence[bytes]) -> bytes:
    """Encodes the changes of one tensor; no change is no bytes."""
    if not places:
        return b""
    return struct.pack(f"<Q{len(places)}I", len(places), *places) + b"".join(values)


def _encode(before: NamedTensor, after: NamedTensor) -> bytes:
    differ = [
        (place, bytes(after.data[element]))
        for place, element in _some(before)
        if before.data[element] != after.data[element]
    ]
    return encode([place for place, _ in differ], [value for _, value in differ])


def _some(tensor: NamedTensor) -> Iterator[tuple[int, slice]]:
    """Yields the indices of the elements that may change, with their bytes' positions."""
    size = tensor.spec.element_type.size_bytes
    count = len(tensor.data) // size
    for place in range(0, count, max(1, count // _EACH)):
        yield place, slice(place * size, (place + 1) * size)
