"""Decodes a message of PushWeights without copying its data.

Invariant: for every message, `decode_push` returns what `PushWeightsRequest.FromString` would
return, except that the data of a chunk is a view of the message instead of a copy. protobuf copies
the data twice, into the message and out of it, which costs more than the rest of a push. Only the
layout that serializers write is read here: the chunk alone, its scalars, then its data. protobuf
decodes everything else.

Wire format: https://protobuf.dev/programming-guides/encoding.
"""

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from treadle.rollout.v1 import weight_sync_service_pb2 as pb

_VARINT, _LENGTH, _FIXED32 = 0, 2, 5  # wire types
_CHUNK = pb.PushWeightsRequest.CHUNK_FIELD_NUMBER << 3 | _LENGTH
_DATA = pb.WeightChunk.DATA_FIELD_NUMBER << 3 | _LENGTH
_LONGEST_VARINT = 10


@dataclass(frozen=True, slots=True)
class PushedChunk:
    """A `WeightChunk`; `data` stays valid for as long as it is held."""

    tensor_index: int
    offset: int
    crc32: int
    data: memoryview


def decode_push(message: bytes) -> PushedChunk | pb.PushHeader | None:
    """Decodes a serialized `PushWeightsRequest`.

    Returns:
        Its payload; None when it has none.

    Raises:
        DecodeError: The bytes are not such a message.
    """
    chunk = _decode_chunk(memoryview(message))
    if chunk is not None:
        return chunk
    request = pb.PushWeightsRequest.FromString(message)
    match request.WhichOneof("payload"):
        case "header":
            return request.header
        case "chunk":
            part = request.chunk
            return PushedChunk(part.tensor_index, part.offset, part.crc32, memoryview(part.data))
        case _:
            return None


def _decode_chunk(message: memoryview) -> PushedChunk | None:
    """Returns the chunk, if the message is laid out as serializers do; else None."""
    if not len(message) or message[0] != _CHUNK:
        return None
    try:
        length, first = _varint(message, 1)
        if first + length != len(message):
            return None
        place = first
        while message[place] != _DATA:
            wire_type = message[place] & 7
            if wire_type == _VARINT:
                _, place = _varint(message, place + 1)
            elif wire_type == _FIXED32:
                place += 5
            else:
                return None
        length, start = _varint(message, place + 1)
        if start + length != len(message):
            return None
        # That this parses proves that a field starts at `place`, however it was found.
        scalars = pb.WeightChunk.FromString(bytes(message[first:place]))
    except (IndexError, DecodeError):
        return None
    return PushedChunk(scalars.tensor_index, scalars.offset, scalars.crc32, message[start:])


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """Returns the number at `place`, and the place after it.

    Raises:
        IndexError: It does not end within the message or its own ten bytes.
    """
    value = 0
    for index in range(_LONGEST_VARINT):
        byte = message[place + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, place + index + 1
    raise IndexError("a varint has at most ten bytes")
