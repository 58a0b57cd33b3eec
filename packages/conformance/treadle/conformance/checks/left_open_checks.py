# ruff: noqa: D102  (a check's name says what it shows)
"""Checks, last of all, that nothing runs or waits on the server."""

import pytest

from treadle.conformance.server_harness import Checks, token_ids_of
from treadle.rollout.v1 import server_service_pb2 as srv


@pytest.mark.asyncio
class CheckLeftOpen(Checks):
    """The state of the server after all other checks."""

    async def test_nothing_runs_and_nothing_waits(self) -> None:
        async with self.connect() as server:
            await server.pause()
            info = await server.refresh()
            if not info.HasField("load"):
                pytest.skip("the server reports no load")
        assert (info.load.running, info.load.queued) == (0, 0)
        assert info.load.started == info.load.finished + info.load.aborted

    async def test_it_serves_as_before(self) -> None:
        async with self.connect() as server:
            assert server.info.state == srv.SERVER_STATE_SERVING
            assert len(token_ids_of(await server.generate())) == 8
