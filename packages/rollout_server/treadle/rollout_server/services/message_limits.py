"""Bounds of a request's bytes, checked before they are decoded.

A message can take thirty times its bytes when it is decoded: an empty nested message has two bytes
on the wire and about sixty in memory. So each method has a bound on its bytes, and those whose
messages repeat a nested one have a bound on the number of fields, which a scan of the wire format
counts without decoding (https://protobuf.dev/programming-guides/encoding). The scan ends at the
bound, so it costs no more than a message that is allowed.

gRPC's own bound (`max_request_bytes`) holds for every message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from treadle.rollout_server.errors import InvalidField

__all__ = ["check_bytes"]

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """Bounds of one method's messages.

    Attributes:
        max_bytes: Maximum of a message without `large_field`.
        max_fields: Fields at the top of a message; None where bytes suffice.
        large_field: Number of the field whose bytes count for gRPC's bound only.
    """

    max_bytes: int
    max_fields: int | None = None
    large_field: int | None = None


# Anyone may ask for health; the name of a service fits.
_HEALTH: Final = _Limit(max_bytes=_KIB)
_OTHER: Final = _Limit(max_bytes=64 * _KIB)
_SYNC, _GENERATION = (
    "/treadle.rollout.v1.WeightSyncService/",
    "/treadle.rollout.v1.GenerationService/",
)
_LIMITS: Final = {
    # Three million ids; images beside them.
    f"{_GENERATION}Generate": _Limit(max_bytes=16 * _MIB, max_fields=1 << 16, large_field=8),
    # Larger requests are calls of Generate. Empty ones would take 120 MiB.
    f"{_GENERATION}GenerateMany": _Limit(max_bytes=4 * _MIB, max_fields=1 << 12),
    # The tensors of a model, with names of 80 bytes, and a few fields beside them.
    f"{_SYNC}BeginUpdate": _Limit(max_bytes=32 * _MIB, max_fields=(1 << 20) + 16),
    # Data, whose length the server chooses (`max_chunk_bytes`), in one nested message.
    f"{_SYNC}PushWeights": _Limit(max_bytes=64 * _KIB, max_fields=16, large_field=2),
    # The parts of a bucket, some 20 bytes each; empty ones would take 120 MiB.
    f"{_SYNC}PushBuckets": _Limit(max_bytes=4 * _MIB),
}


def check_bytes(method: str, raw: bytes) -> None:
    """Raises unless a request is within its method's bounds.

    Bytes that are no message pass: decoding refuses them.

    Raises:
        InvalidField: It is longer, or has more fields; the message has the number and the bound.
    """
    health = method.startswith("/grpc.health.")
    if len(raw) <= _OTHER.max_bytes and not health:
        return  # whatever it holds, and the usual prompt is not scanned
    limit = _HEALTH if health else _LIMITS.get(method, _OTHER)
    if limit.max_fields is None:
        counted, fields = len(raw), 0
    else:
        counted, fields = _scan(raw, limit)
    if counted > limit.max_bytes:
        raise InvalidField(
            "request", f"{counted} bytes long", f"at most {limit.max_bytes} bytes for {method}"
        )
    if limit.max_fields is not None and fields > limit.max_fields:
        raise InvalidField(
            "request",
            f"a message of more than {limit.max_fields} fields",
            f"at most {limit.max_fields} fields for {method}; numbers packed as proto3 does",
        )


def _scan(raw: bytes, limit: _Limit) -> tuple[int, int]:
    """Returns the bytes without those of the large field, and the number of fields.

    Stops after one field too many, and where the bytes are no message.
    """
    assert limit.max_fields is not None, "only methods with a bound on fields are scanned"
    place, end, large, fields = 0, len(raw), 0, 0
    while place < end and fields <= limit.max_fields:
        began = place
        key, place = _varint(raw, place)
        match key & 7:
            case 0:
                _, place = _varint(raw, place)
            case 1:
                place += 8
            case 2:
                length, place = _varint(raw, place)
                place += length
            case 5:
                place += 4
            case 3 | 4:
                pass  # The ends of a group: what is in it counts like what is beside it.
            case _:
                break
        fields += 1
        if key >> 3 == limit.large_field:
            large += min(place, end) - began
    return end - large, fields


def _varint(raw: bytes, place: int) -> tuple[int, int]:
    """Returns the number at a place and the place after it; the end where it is cut."""
    value = shift = 0
    for number, byte in enumerate(raw[place : place + 10], start=1):
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + number
        shift += 7
    return 0, len(raw)
