"""Tests of the router's owner, with the real process."""

import asyncio
import os
import platform
import re
import signal
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from treadle.agent_loop.clock import LoopClock
from treadle.agent_loop.rpc import ChannelSecurity, RetryPolicy, RpcDeadlines
from treadle.agent_loop.rpc.router.client import RemoteRouter
from treadle.trainer.config.load import load_config
from treadle.trainer.launch.local import LocalLauncher, LocalProcess
from treadle.trainer.launch.process import ProcessSpec
from treadle.trainer.rollout.workers.router import RouterLostError, RunRouter

pytestmark = pytest.mark.asyncio


class Launcher(LocalLauncher):
    """Tells of what it started, and kills some before they serve."""

    def __init__(self, directory: Path, *, kills: Collection[str]) -> None:
        super().__init__(directory)
        self._kills = kills
        self.started: asyncio.Queue[LocalProcess] = asyncio.Queue()

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        process = await super().start(spec)
        if spec.name in self._kills:
            os.kill(process.pid, signal.SIGKILL)
            return process
        self.started.put_nowait(process)
        return process


@asynccontextmanager
async def _asked(address: str) -> AsyncIterator[RemoteRouter]:
    async with RemoteRouter.connect(
        address,
        security=ChannelSecurity(),
        deadlines=RpcDeadlines(),
        retry=RetryPolicy(),
        clock=LoopClock(),
    ) as router:
        yield router


async def test_a_router_that_dies_is_started_again_where_it_was_with_the_servers_of_the_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = ["model.path=/m", "data.train_files=/t.jsonl", "agent.max_worker_restarts=2"]
    lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
    async with (
        Launcher(tmp_path, kills={"router-restart-1"}) as launcher,
        RunRouter(launcher, load_config([], given).config, on_lost=lost.set_result) as router,
    ):
        await router.start(["127.0.0.1:1", "127.0.0.1:2"])
        first = await launcher.started.get()
        async with _asked(router.address) as client:
            assert sorted(await client.replicas()) == ["127.0.0.1:1", "127.0.0.1:2"]
            router.set_replicas(["127.0.0.1:2"], draining=["127.0.0.1:3"])
            await router.tell()
            assert sorted(await client.replicas()) == ["127.0.0.1:2", "127.0.0.1:3"]
            monkeypatch.setattr(RunRouter, "_SHARES_S", 60.0)
            occupied_s = await router.occupied_s()
            assert occupied_s.keys() == {"127.0.0.1:2", "127.0.0.1:3"}
            os.kill(first.pid, signal.SIGSTOP)
            monkeypatch.setattr(RunRouter, "_SHARES_S", 0.01)
            # A step does not wait for a router that stands still, and has the last answer.
            assert await router.occupied_s() == occupied_s
            assert f"the router {router.address} gave no answer for 0.01 s" in caplog.text
            os.kill(first.pid, signal.SIGKILL)
            second = await launcher.started.get()
            await second.ready(60.0)
            assert sorted(await client.replicas()) == ["127.0.0.1:2", "127.0.0.1:3"]
        os.kill(second.pid, signal.SIGKILL)
        error = await lost
        assert (await router.occupied_s()).keys() == occupied_s.keys()  # the last that is known
    assert isinstance(error, RouterLostError)
    assert "after 2 restarts (agent.max_worker_restarts=2), the router (127.0.0.1:" in str(error)
    assert f"was ended by SIGKILL on node {platform.node()}; its log ends with:" in str(error)


@pytest.mark.parametrize("max_restarts", [1, 2])
async def test_a_router_that_dies_before_it_first_served_is_started_again(
    tmp_path: Path, max_restarts: int, caplog: pytest.LogCaptureFixture
) -> None:
    given = ["model.path=/m", "data.train_files=/t.jsonl"]
    config = load_config([], [*given, f"agent.max_worker_restarts={max_restarts}"]).config
    ended = rf"was ended by SIGKILL on node {platform.node()} before it served; .* ends with:\n"
    async with (
        Launcher(tmp_path, kills={"router", "router-restart-1"}) as launcher,
        RunRouter(launcher, config, on_lost=lambda lost: pytest.fail(str(lost))) as router,
    ):
        if max_restarts == 1:
            with pytest.raises(RouterLostError, match=rf"after 1 restarts .*, router-.* {ended}"):
                await router.start(["127.0.0.1:1"])
            return
        await router.start(["127.0.0.1:1"])
        assert (await launcher.started.get()).name == "router-restart-2"
        async with _asked(router.address) as client:
            assert await client.replicas() == ["127.0.0.1:1"]
    assert re.search(f"router {ended}.*\nit is started again", caplog.text)
