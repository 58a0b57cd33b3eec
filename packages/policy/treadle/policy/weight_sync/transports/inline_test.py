import zlib

from hypothesis import given
from hypothesis import strategies as st

from treadle.policy.weight_sync.transports.inline import chunk_message
from treadle.rollout.v1 import weight_sync_service_pb2 as pb


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=1, max_size=300) | st.integers(1, 2**22).map(bytes),
)
def test_a_chunk_is_what_protobuf_would_write(index: int, offset: int, data: bytes) -> None:
    chunk = pb.WeightChunk(tensor_index=index, offset=offset, crc32=zlib.crc32(data), data=data)
    expected = pb.PushWeightsRequest(chunk=chunk).SerializeToString()
    assert chunk_message(index, offset, memoryview(data)) == expected
