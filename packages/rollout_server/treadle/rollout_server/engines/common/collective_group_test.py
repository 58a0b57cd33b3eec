from treadle.rollout_server.engine import CollectiveGroup, ElementType, TensorSpec
from treadle.rollout_server.engines.common.collective_group import decode_group, encode_group


def test_a_group_arrives_as_it_was() -> None:
    group = CollectiveGroup(
        backend="gloo",
        rendezvous="127.0.0.1:1",
        group_name="g-1",
        world_size=3,
        first_rank=1,
        bucket_bytes=64,
        senders=(0, 0),
    )
    specs = tuple(
        TensorSpec(name=name, element_type=ElementType.BFLOAT16, shape=(2, 3)) for name in "ab"
    )
    assert decode_group(encode_group(group, specs)) == (group, specs)
