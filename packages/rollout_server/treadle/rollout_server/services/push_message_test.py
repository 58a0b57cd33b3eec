import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout_server.services.push_message import PushedChunk, decode_push

CHUNKS = st.builds(
    pb.WeightChunk,
    tensor_index=st.integers(0, 2**32 - 1),
    offset=st.integers(0, 2**64 - 1),
    crc32=st.integers(0, 2**32 - 1),
    data=st.binary(max_size=300),
)


def by_protobuf(message: bytes) -> object:
    """What `decode_push` must tell."""
    try:
        request = pb.PushWeightsRequest.FromString(message)
    except DecodeError:
        return DecodeError
    if request.WhichOneof("payload") == "chunk":
        chunk = request.chunk
        return (chunk.tensor_index, chunk.offset, chunk.crc32, chunk.data)
    return request.header if request.HasField("header") else None


def by_hand(message: bytes) -> object:
    try:
        payload = decode_push(message)
    except DecodeError:
        return DecodeError
    if isinstance(payload, PushedChunk):
        return (payload.tensor_index, payload.offset, payload.crc32, bytes(payload.data))
    return payload


@given(CHUNKS)
def test_a_serialized_chunk_is_read_in_place(chunk: pb.WeightChunk) -> None:
    message = pb.PushWeightsRequest(chunk=chunk).SerializeToString()
    payload = decode_push(message)
    assert isinstance(payload, PushedChunk)
    assert by_hand(message) == by_protobuf(message)
    assert not chunk.data or payload.data.obj is message


@given(
    st.lists(CHUNKS, max_size=3),
    st.lists(st.binary(max_size=6), min_size=4, max_size=4),
    st.integers(0, 400),
    st.booleans(),
)
@example([], [b"\n\x03\n\x01u", b"", b"", b""], 400, False)
@example([], [b"\x12\x02\x7a\x80", b"", b"", b""], 400, False)
@example([], [b"\x12\x0b\x10" + b"\xff" * 9 + b"\x01", b"", b"", b""], 400, False)
@example([], [b"\x12\x04\x0f\x7a\x00\x00", b"", b"", b""], 400, False)
def test_any_bytes_mean_what_protobuf_says(
    chunks: list[pb.WeightChunk], between: list[bytes], length: int, inside: bool
) -> None:
    parts = [
        chunk.SerializeToString()
        if inside
        else pb.PushWeightsRequest(chunk=chunk).SerializeToString()
        for chunk in chunks
    ]
    joined = b"".join(a + b for a, b in zip(between, [*parts, b"", b"", b""], strict=False))
    if inside:
        joined = pb.PushWeightsRequest().SerializeToString() + _field(2, joined)
    message = joined[:length]
    assert by_hand(message) == by_protobuf(message)


def test_a_header_and_nothing_are_told_apart() -> None:
    header = pb.PushHeader(update_id="u")
    assert decode_push(pb.PushWeightsRequest(header=header).SerializeToString()) == header
    assert decode_push(b"") is None
    with pytest.raises(DecodeError):
        decode_push(b"\x12\x7f")


def _field(number: int, data: bytes) -> bytes:
    """A length-delimited field."""
    length, low = b"", len(data)
    while low >= 0x80:
        length += bytes([low & 0x7F | 0x80])
        low >>= 7
    return bytes([number << 3 | 2]) + length + bytes([low]) + data
