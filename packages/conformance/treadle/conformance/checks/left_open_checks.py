# ruff: noqa: D102  (a check's name says what it shows)
"""What the other checks left behind: nothing."""

import pytest

from treadle.conformance.checks.server_harness import Checks, ids
from treadle.rollout.v1 import server_service_pb2 as srv


@pytest.mark.asyncio
class CheckLeftOpen(Checks):
    """Runs last."""

    async def test_nothing_runs_and_nothing_waits(self) -> None:
        async with self.bench() as it:
            await it.pause()
            server = await it.info()
            if not server.HasField("load"):
                pytest.skip("it tells no load")
        assert (server.load.running, server.load.queued) == (0, 0)
        assert server.load.started == server.load.finished + server.load.aborted

    async def test_it_serves_as_before(self) -> None:
        async with self.bench() as it:
            assert it.server.state == srv.SERVER_STATE_SERVING
            assert len(ids(await it.generate())) == 8
