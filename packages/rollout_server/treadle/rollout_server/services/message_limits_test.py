import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout_server.errors import InvalidField
from treadle.rollout_server.services.message_limits import _Limit, _scan, check_bytes

_GENERATE = "/treadle.rollout.v1.GenerationService/Generate"
_SYNC = "/treadle.rollout.v1.WeightSyncService"
_MIB = 1 << 20


def test_messages_of_usual_size_pass() -> None:
    image = gen.PromptImage(data=bytes(20 * _MIB), media_type="image/png")
    generate = gen.GenerateRequest(prompt_token_ids=range(1 << 20), images=[image, image])
    check_bytes(_GENERATE, generate.SerializeToString())
    specs = [
        pb.TensorSpec(name=f"model.layers.{n}.mlp.experts.7.down_proj.weight", shape=[4096, 4096])
        for n in range(150_000)
    ]
    check_bytes(f"{_SYNC}/BeginUpdate", pb.BeginUpdateRequest(tensors=specs).SerializeToString())
    chunk = pb.PushWeightsRequest(chunk=pb.WeightChunk(data=bytes(32 * _MIB)))
    check_bytes(f"{_SYNC}/PushWeights", chunk.SerializeToString())


@pytest.mark.parametrize(
    ("method", "raw", "why"),
    [
        # Each decodes to more than a gigabyte at 64 MiB.
        (_GENERATE, b"\x42\x00" * _MIB, "at most 65536 fields"),
        (_GENERATE, b"\x0b" + b"\x42\x00" * _MIB, "at most 65536 fields"),
        (f"{_SYNC}/BeginUpdate", b"\x1a\x00" * 2 * _MIB, "at most 1048592 fields"),
        (f"{_SYNC}/PushBuckets", b"\x12\x00" * 3 * _MIB, "at most 4194304 bytes"),
        # And these to hundreds of megabytes.
        (_GENERATE, gen.GenerateRequest(prompt_token_ids=[1] * 17 * _MIB), "at most 16777216"),
        (
            f"{_SYNC}/PushWeights",
            b"\x12" + b"\x80\x80\x04" + bytes(1 << 16) + b"\x12\x00" * 17,
            "at most 16 fields",
        ),
        (f"{_SYNC}/CommitUpdate", bytes(65537), "at most 65536 bytes"),
        ("/grpc.health.v1.Health/Check", bytes(1025), "at most 1024 bytes"),
    ],
    ids=["images", "images_in_a_group", "tensors", "parts", "ids", "chunks", "commit", "health"],
)
def test_what_would_take_many_times_its_bytes_is_refused_before_it_is_decoded(
    method: str, raw: bytes | gen.GenerateRequest, why: str
) -> None:
    data = raw if isinstance(raw, bytes) else raw.SerializeToString()
    with pytest.raises(InvalidField, match=why):
        check_bytes(method, data)


@given(st.binary())
def test_any_bytes_are_scanned_to_an_end(raw: bytes) -> None:
    check_bytes(_GENERATE, raw)  # decoding refuses them


@given(st.lists(st.binary(max_size=300)), st.lists(st.integers(0, 2**32 - 1)))
def test_the_bytes_of_images_are_told_from_the_others(images: list[bytes], ids: list[int]) -> None:
    plain = gen.GenerateRequest(prompt_token_ids=ids, request_id="r", priority=-3)
    size = len(plain.SerializeToString())
    plain.images.extend(gen.PromptImage(data=data, first_placeholder=2**31) for data in images)
    limit = _Limit(max_bytes=0, max_fields=10_000, large_field=8)
    fields = 2 + bool(ids) + len(images)
    assert _scan(plain.SerializeToString(), limit) == (size, fields)
