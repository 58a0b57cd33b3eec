"""A server that someone else runs, in a process, is started again in the middle of a run."""

import asyncio
import contextlib
import math
from pathlib import Path
from typing import ClassVar, cast

import pytest

from treadle.agent_loop import RequestContext, SamplingParams
from treadle.agent_loop.rpc import Requirements
from treadle.rollout_server.testing import ServerProcess
from treadle.trainer.config.load import load_config
from treadle.trainer.launch.local import LocalLauncher
from treadle.trainer.policy.group import PolicyGroup
from treadle.trainer.rollout.server_pool import ServerPool
from treadle.trainer.weight_sync.errors import WeightSyncError
from treadle.trainer.weight_sync.publisher import WeightPublisher
from treadle.trainer.weight_sync.testing import Weights


class Unaware(ServerPool):
    """It asks a server once an hour how it is, so that a test is always before it notices."""

    _ASK_AGAIN_S: ClassVar[float] = 3600.0

    async def versions(self, session: str) -> set[int]:
        """Returns the versions that sample a completion which may be of any."""
        request = RequestContext(request_id="r", session_id=session, deadline=math.inf)
        completion = await self.generator.generate(
            (1, 2, 3), SamplingParams(max_tokens=4), request=request
        )
        return {chunk.weight_version for chunk in completion.chunks}

    async def until_answers(self, address: str) -> None:
        """Returns when the server answers on the connection that its predecessor had."""
        (client,) = (server.client for server in self.live if server.address == address)
        while True:
            with contextlib.suppress(WeightSyncError):
                await client.info()
                return


@pytest.mark.asyncio
async def test_a_server_that_was_started_again_samples_nothing_before_it_has_the_present_weights(
    tmp_path: Path,
) -> None:
    with contextlib.ExitStack() as stack:

        def serve(address: str = "127.0.0.1:0") -> ServerProcess:
            return stack.enter_context(ServerProcess("--engine", "fake", "--address", address))

        servers = {s.wait_ready().address: s for s in [serve(), serve()]}
        config = load_config(
            [],
            [
                *("model.path=/m", "data.train_files=/t.jsonl"),
                f"rollout.addresses=[{','.join(servers)}]",
            ],
        ).config
        publisher = WeightPublisher(
            cast(PolicyGroup, Weights()), config.sync, element_type="float32", directory=tmp_path
        )
        async with (
            LocalLauncher(tmp_path) as launcher,
            Unaware(launcher, config, publish=publisher.publish) as pool,
        ):
            await pool.connect(Requirements())
            await pool.sync_weights(3)
            assert await pool.versions("here") == {3}
            (address,) = (a for a in servers if pool.generator.sessions_at(a))
            servers[address].close()
            await asyncio.to_thread(serve(address).wait_ready)
            await pool.until_answers(address)
            # It holds version 0, and nobody has noticed: the session continues at the other one.
            assert len(pool.routes.serving) == 2
            assert await pool.versions("here") == {3}
            assert pool.generator.sessions_at(address) == 0

            assert await pool.ensure_healthy()
            assert address not in pool.routes.serving
            await pool.wait_for_change()
            assert await pool.ensure_healthy()
            assert address in pool.routes.serving
            pool.drain(next(a for a in servers if a != address), now=True)
            assert await pool.versions("new") == {3}
            assert pool.generator.sessions_at(address) == 1
