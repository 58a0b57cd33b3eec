# ruff: noqa: D102  (a check's name says what it shows)
"""Validation of collective groups in BeginUpdate; the server joins none here."""

from typing import Any

import pytest

from treadle.conformance.client.refusals import Refusal
from treadle.conformance.server_harness import Checks, ServerHarness
from treadle.rollout.v1 import errors_pb2
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync

_INVALID: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("backend unknown", "collective.backend", {"backend": "mpi"}),
    ("rendezvous without port", "collective.rendezvous", {"rendezvous": "127.0.0.1"}),
    ("group_name empty", "collective.group_name", {"group_name": ""}),
    ("bucket_bytes 0", "collective.bucket_bytes", {"bucket_bytes": 0}),
    ("senders of too few", "collective.senders", {"senders": [0]}),
    ("first_rank a sender's", "collective.first_rank", {"first_rank": 0}),
    ("world_size too small", "collective.first_rank", {"world_size": 1}),
)


@pytest.mark.asyncio
class CheckCollective(Checks):
    """BeginUpdate(collective)."""

    async def _refused(
        self, server: ServerHarness, *, staged: bool = False, **changes: Any
    ) -> Refusal:
        values: dict[str, Any] = {
            "backend": "gloo",
            "rendezvous": "127.0.0.1:9",
            "group_name": "conformance",
            "world_size": 1 + server.info.num_workers,
            "first_rank": 1,
            "bucket_bytes": 4096,
            "senders": [0] * len(server.tensors()),
        } | changes
        _, found = await server.refused_begin(
            inline=None,
            collective=sync.CollectiveTransport(**values),
            in_place=None if staged else sync.InPlace(in_flight=sync.IN_FLIGHT_POLICY_DRAIN),
        )
        assert (await server.refresh()).state == srv.SERVER_STATE_SERVING
        return found

    @pytest.mark.parametrize(
        ("field", "changes"), [row[1:] for row in _INVALID], ids=[row[0] for row in _INVALID]
    )
    async def test_a_malformed_group_is_named(self, field: str, changes: dict[str, Any]) -> None:
        async with self.connect() as server:
            if not server.capabilities.collective_transport:
                pytest.skip("the server joins no collective groups")
            found = await self._refused(server, **changes)
        assert (found.code, found.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert found.detail(errors_pb2.InvalidField).field == field

    async def test_a_group_is_always_in_place(self) -> None:
        async with self.connect() as server:
            if not server.capabilities.collective_transport:
                pytest.skip("the server joins no collective groups")
            found = await self._refused(server, staged=True)
        assert (found.code, found.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert found.detail(errors_pb2.InvalidField).field == "in_place"

    async def test_it_is_refused_without_the_capability(self) -> None:
        async with self.connect() as server:
            if server.capabilities.collective_transport:
                pytest.skip("the server joins collective groups")
            found = await self._refused(server)
        assert (found.code, found.reason) == ("UNIMPLEMENTED", "CAPABILITY_MISSING")
