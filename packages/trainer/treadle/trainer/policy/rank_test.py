import socket

import pytest

from treadle.trainer.policy.commands import OpenRendezvous, Specs
from treadle.trainer.policy.rank import PolicyRank, _kind


def test_nobody_takes_the_port_at_which_the_ranks_are_to_meet() -> None:
    rank = PolicyRank("127.0.0.1")
    host, _, port = str(rank.execute(OpenRendezvous())).rpartition(":")
    with pytest.raises(OSError, match="in use"):
        socket.create_server((host, int(port)))


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5", "peer"),
        ("Failed to recv, got 0 bytes. Connection was likely closed. Did it crash?", "peer"),
        ("The client socket has timed out after 600000ms", "peer"),
        ("shapes do not fit", "bug"),
    ],
)
def test_the_end_of_another_rank_is_told_from_a_failure(message: str, kind: str) -> None:
    assert _kind(RuntimeError(message), Specs()) == kind
