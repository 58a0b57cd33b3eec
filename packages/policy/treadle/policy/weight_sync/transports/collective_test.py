"""Who is in which group, and what happens when a group fails, with fake ranks and servers.

`tests/e2e/collective_publish_test.py` has real ones.
"""

from collections.abc import Sequence
from typing import Any, cast

import pytest
from google.protobuf.message import Message

from treadle.policy.client.group import PolicyGroup
from treadle.policy.client.types import TensorSpec
from treadle.policy.config.weight_sync import CollectiveTransportConfig, WeightSyncConfig
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.errors import Outcome, WeightSyncError
from treadle.policy.weight_sync.server_security import ServerSecurity
from treadle.policy.weight_sync.transports.collective import CollectivePublisher
from treadle.policy.weight_sync.update_round import UpdateRound
from treadle.rollout.v1 import server_service_pb2 as server_pb
from treadle.rollout.v1 import weight_sync_service_pb2 as pb

TRANSPORT = CollectiveTransportConfig(bucket_bytes=1 << 20)
SENT = weights_pb.BroadcastResponse(num_bytes=4, error=None, lost=())
SPECS = tuple(
    TensorSpec(name=name, shape=(1,), element_type="float32", sender=sender)
    for name, sender in (("a", 0), ("b", 0), ("c", 2))
)
"""Of two pipeline stages whose senders are the ranks 0 and 2 of four."""


class Ranks:
    """Four ranks; `reports` are rank 2's answers to the next broadcasts."""

    def __init__(self) -> None:
        self.reports: list[weights_pb.BroadcastResponse] = []
        self.broadcasts: list[weights_pb.BroadcastRequest] = []

    async def call(self, request: Message) -> Sequence[Any]:
        """As `PolicyGroup.call`."""
        if isinstance(request, weights_pb.OpenGroupRequest):
            assert request.rank == 0
            others = [weights_pb.OpenGroupResponse()] * 3
            return [weights_pb.OpenGroupResponse(rendezvous="127.0.0.1:5"), *others]
        assert isinstance(request, weights_pb.BroadcastRequest)
        self.broadcasts.append(request)
        return [SENT, SENT, self.reports.pop(0) if self.reports else SENT, SENT]


class Server:
    """A server that accepts every call, except the next one of each name in `refuse`."""

    def __init__(self, name: str, num_workers: int) -> None:
        self.name = name
        self.begun: list[pb.CollectiveTransport] = []
        self.calls: list[str] = []
        self.refuse: dict[str, Outcome] = {}
        self._num_workers = num_workers

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        if call in self.refuse:
            raise WeightSyncError(f"{self.name} refused {call}", self.refuse.pop(call))

    async def info(self) -> server_pb.GetServerInfoResponse:
        self._enter("info")
        return server_pb.GetServerInfoResponse(num_workers=self._num_workers)

    async def begin(self, request: pb.BeginUpdateRequest) -> pb.BeginUpdateResponse:
        self._enter("begin")
        assert request.in_place.in_flight == pb.IN_FLIGHT_POLICY_DRAIN
        self.begun.append(request.collective)
        return pb.BeginUpdateResponse()

    async def abort(self, update_id: str) -> None:
        self._enter("abort")

    async def commit(self, update_id: str, in_flight: pb.InFlightPolicy) -> int:
        self._enter("commit")
        return 1


class Harness:
    """A publisher, its ranks, and three servers with one, two and one workers."""

    def __init__(self) -> None:
        self.ranks = Ranks()
        self.servers = [Server("one", 1), Server("two", 2), Server("three", 1)]
        self._publisher = CollectivePublisher()

    async def publish(self, *names: str) -> UpdateRound:
        """Publishes one version to the servers of these names; to all by default."""
        live = {s.name: s for s in self.servers if s.name in names or not names}
        update_round = UpdateRound(
            version=1,
            policy=cast(PolicyGroup, self.ranks),
            config=WeightSyncConfig(transport=TRANSPORT, max_push_attempts=3),
            element_type="float32",
            security=ServerSecurity(),
            specs=SPECS,
            live=cast("dict[str, WeightSyncClient]", live),
        )
        await self._publisher.publish(update_round, TRANSPORT)
        return update_round

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Generation and size of the group of each broadcast."""
        return [(b.group_name.rpartition("-")[2], b.world_size) for b in self.ranks.broadcasts]


@pytest.mark.asyncio
async def test_a_group_is_kept_while_its_servers_are_the_same() -> None:
    harness = Harness()
    for names in ((), (), ("one", "three"), ()):
        await harness.publish(*names)
    assert harness.groups == [("1", 6), ("1", 6), ("2", 4), ("3", 6)]
    assert [server.calls.count("info") for server in harness.servers] == [3, 2, 3]
    first = [server.begun[0] for server in harness.servers]
    assert [group.first_rank for group in first] == [2, 3, 5]
    assert all(list(group.senders) == [0, 0, 1] for group in first)
    assert all(group.rendezvous == "127.0.0.1:5" for group in first)


@pytest.mark.asyncio
async def test_a_broadcast_that_failed_is_begun_again_in_a_new_group() -> None:
    harness = Harness()
    harness.ranks.reports = [
        weights_pb.BroadcastResponse(num_bytes=0, error="reset by peer", lost=())
    ]
    harness.servers[1].refuse["abort"] = Outcome.RESTART  # It has noticed, and ended the update.
    update_round = await harness.publish()
    assert list(update_round.live) == ["one", "two", "three"]
    assert harness.groups == [("1", 6), ("2", 6)]
    for server in harness.servers:
        assert server.calls == ["info", "begin", "abort", "info", "begin", "commit"]


@pytest.mark.asyncio
async def test_who_cannot_be_reached_any_more_is_left_out() -> None:
    harness = Harness()
    harness.ranks.reports = [
        weights_pb.BroadcastResponse(num_bytes=0, error="reset by peer", lost=())
    ]
    harness.servers[2].refuse["abort"] = Outcome.RESUME
    update_round = await harness.publish()
    assert (list(update_round.live), harness.groups) == (["one", "two"], [("1", 6), ("2", 5)])
    assert update_round.failed == {"three": "three refused abort"}


@pytest.mark.asyncio
@pytest.mark.parametrize("rank", [3, 4])
async def test_the_server_of_a_lost_rank_is_left_out(rank: int) -> None:
    harness = Harness()
    harness.ranks.reports = [
        weights_pb.BroadcastResponse(num_bytes=0, error="no room", lost=(rank,))
    ]
    update_round = await harness.publish()
    assert (list(update_round.live), harness.groups) == (["one", "three"], [("1", 6), ("2", 4)])
    assert "no room" in update_round.failed["two"]


@pytest.mark.asyncio
async def test_a_server_that_does_not_begin_costs_the_others_a_new_group_and_no_attempt() -> None:
    harness = Harness()
    await harness.publish()
    for server in harness.servers[:2]:
        server.calls.clear()
    harness.servers[2].refuse["begin"] = Outcome.REPLACE
    update_round = await harness.publish()
    assert (list(update_round.live), harness.groups[-1]) == (["one", "two"], ("2", 5))
    for server in harness.servers[:2]:
        assert server.calls == ["begin", "abort", "info", "begin", "commit"]


@pytest.mark.asyncio
async def test_an_answer_that_got_lost_costs_no_group() -> None:
    harness = Harness()
    harness.servers[2].refuse["begin"] = Outcome.RESUME
    update_round = await harness.publish()
    assert (list(update_round.live), harness.groups) == (["one", "two", "three"], [("1", 6)])
    assert harness.servers[2].calls == ["info", "begin", "begin", "commit"]


@pytest.mark.asyncio
async def test_the_last_attempt_drops_all() -> None:
    harness = Harness()
    harness.ranks.reports = [
        weights_pb.BroadcastResponse(num_bytes=0, error="no route", lost=())
    ] * 3
    update_round = await harness.publish()
    assert not update_round.live
    assert set(update_round.failed) == {"one", "two", "three"}
    assert all("no route" in cause for cause in update_round.failed.values())
    assert all("commit" not in server.calls for server in harness.servers)


@pytest.mark.asyncio
async def test_an_incompatible_server_ends_the_publication() -> None:
    harness = Harness()
    harness.servers[0].refuse["begin"] = Outcome.FATAL
    with pytest.raises(WeightSyncError, match="one refused begin"):
        await harness.publish()
