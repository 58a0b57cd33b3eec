from typing import Any

import pytest

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout_server.engine import CollectiveGroup
from treadle.rollout_server.errors import InvalidField
from treadle.rollout_server.services.begin import decode_begin
from treadle.rollout_server.services.testing import begin_request

VALUES: dict[str, Any] = {
    "backend": "gloo",
    "rendezvous": "127.0.0.1:29500",
    "group_name": "g",
    "world_size": 6,
    "first_rank": 2,
    "bucket_bytes": 64,
    "senders": [0, 1, 1],
}


def decode(*, loopback_only: bool = True, **changes: Any) -> CollectiveGroup:
    """Decodes the group of `VALUES` with some of them changed, for an engine of two workers."""
    request = begin_request(
        tensors=[
            pb.TensorSpec(name=name, element_type=pb.ELEMENT_TYPE_FLOAT32, shape=[1])
            for name in "abc"
        ],
        inline=None,
        collective=pb.CollectiveTransport(**VALUES | changes),
        in_place=pb.InPlace(in_flight=pb.IN_FLIGHT_POLICY_DRAIN),
    )
    begin = decode_begin(request, max_lease_s=60, num_workers=2, loopback_only=loopback_only)
    assert isinstance(begin.source, CollectiveGroup)
    return begin.source


def test_a_group_is_taken_as_it_is() -> None:
    assert decode() == CollectiveGroup(**VALUES | {"senders": (0, 1, 1)})
    assert decode(first_rank=4).first_rank == 4


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"first_rank": 1}, r"first_rank is 1, expected from 2 to 4: after the senders"),
        ({"first_rank": 5}, r"first_rank is 5, expected from 2 to 4.*room for 2 workers"),
        ({"senders": [0, 2, 2]}, r"senders is \[0, 2\], expected the 2 ranks from 0 on"),
        ({"senders": [0, 1]}, "senders is 2 values, expected one for each of 3 tensors"),
        ({"rendezvous": "10.0.0.1:29500"}, "on loopback.*allow_plaintext_group"),
        ({"rendezvous": "10.0.0.1"}, "expected host:port"),
        ({"group_name": ""}, "group_name is 0 bytes long, expected 1 to 1024"),
        ({"group_name": "é" * 600}, "group_name is 1200 bytes long"),
    ],
)
def test_ranks_and_addresses_that_do_not_fit_this_server_are_refused(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidField, match=says):
        decode(**changes)


@pytest.mark.parametrize("rendezvous", ["localhost:1", "[::1]:1", "127.8.9.1:1"])
def test_loopback_has_many_names(rendezvous: str) -> None:
    assert decode(rendezvous=rendezvous).rendezvous == rendezvous


def test_a_trusted_network_is_allowed_if_configured() -> None:
    assert decode(rendezvous="10.0.0.1:29500", loopback_only=False).rendezvous == "10.0.0.1:29500"


def test_long_names_and_paths_are_refused_before_they_are_looked_at() -> None:
    named = begin_request(
        tensors=[
            pb.TensorSpec(name="n" * 1025, element_type=pb.ELEMENT_TYPE_FLOAT32, shape=[1]),
        ]
    )
    with pytest.raises(InvalidField, match=r"tensors\[0\].name is 1025 bytes long"):
        decode_begin(named, max_lease_s=60, num_workers=1, loopback_only=True)
    tensor = pb.TensorSpec(name="a", element_type=pb.ELEMENT_TYPE_FLOAT32, shape=[1])
    placed = begin_request(
        tensors=[tensor],
        inline=None,
        file=pb.FileTransport(directory="a/" * 2049, crc32=[0]),
    )
    with pytest.raises(InvalidField, match=r"file\.directory is 4098 bytes long, expected 0 to 4"):
        decode_begin(placed, max_lease_s=60, num_workers=1, loopback_only=True)
